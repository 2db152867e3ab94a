"""Laws of the forms of vLLM V0: sequence groups, encoder-decoder lengths, graph state."""
