"""Batch-invariant attention on Hopper chips: requests of any length, fixed splits of their keys."""
