"""The KV cache: block tables and slot mapping in numpy and Triton, Triton cache kernels."""
