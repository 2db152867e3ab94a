"""What is measured by hand: host times, tolerances, and the ladder of kernels."""
