"""Partial results over a shared prefix on Hopper chips: the first launch of a cascade."""
