"""Dispatch: one pipeline from an attention call to its launches, and the choice of kernels."""
