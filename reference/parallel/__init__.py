"""Attention that several ranks compute together, over process groups."""
