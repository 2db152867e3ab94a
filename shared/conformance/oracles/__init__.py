"""Oracles: brute-force attention key by key, and dense attention in float64."""
