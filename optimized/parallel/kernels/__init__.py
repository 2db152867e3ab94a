"""Kernels of parallel steps: exchange and combination of partial results."""
