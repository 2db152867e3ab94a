"""Comparison of results with the expected ones, and of memory with what it was before a call."""
