"""The ladder of kernels on a GPU: what checks, compiles and times the rungs of its package."""
