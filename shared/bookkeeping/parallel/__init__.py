"""Bookkeeping of ranks: which keys and which tokens each of them has."""
