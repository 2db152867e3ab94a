"""Validation of the forms of vLLM V0."""
