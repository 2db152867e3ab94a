"""Inputs of definitions, from the arguments of operations."""
