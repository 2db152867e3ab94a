"""Real serving traffic, replayed step by step on both twins."""
