"""Libraries that are timed with selected keys only."""
