"""Candidates: how an implementation is loaded, and what it declares."""
