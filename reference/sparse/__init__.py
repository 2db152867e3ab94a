"""Sparse attention: the selection of keys, and attention over the selected ones."""
