"""The attention kernels in Triton for any CUDA device."""
