"""Kernels of the indexer, and the compaction of selections."""
