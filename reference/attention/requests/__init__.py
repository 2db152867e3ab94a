"""Requests of a batch: their rows, and the positions of their queries and keys."""
