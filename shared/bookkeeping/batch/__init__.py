"""Batch operations that need no twin."""
