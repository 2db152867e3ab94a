"""The oracle: brute-force attention in float64, key by key."""
