"""The classes of vLLM V0's forms: sequence groups, and the buffers of captured steps."""
