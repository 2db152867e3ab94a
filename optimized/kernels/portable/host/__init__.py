"""Host code of the portable kernels: family, launches, tiles."""
