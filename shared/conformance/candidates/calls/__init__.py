"""Calls of a candidate's operations, and the check of their results."""
