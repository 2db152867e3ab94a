"""Warm-up: the kernels of a model are compiled before the first call."""
