"""Recorded inputs and outputs of vLLM's own functions, and how they are run on both twins."""
