"""The kernels for Hopper GPUs (compute capability 9.0), written in Gluon."""
