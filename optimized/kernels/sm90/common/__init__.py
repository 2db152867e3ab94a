"""What the kernel families for Hopper GPUs have in common."""
