"""Attention operations that need no twin."""
