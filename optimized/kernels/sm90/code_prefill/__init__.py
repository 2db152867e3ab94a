"""Prefill from an FP8 cache on Hopper chips: its keys in 16 bits, then the prefill kernel."""
