"""Prefill on Hopper chips."""
