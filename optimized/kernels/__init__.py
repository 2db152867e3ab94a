"""The kernels: portable Triton kernels, and a folder per chip."""
