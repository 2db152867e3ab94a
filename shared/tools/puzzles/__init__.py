"""Puzzles: twelve functions to write, each checked against small cases and the laws."""
