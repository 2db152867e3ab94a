"""Hypothesis strategies: batches, caches, steps and options on which the laws are tried."""
