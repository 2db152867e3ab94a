"""The public attention operations of the optimized twin."""
