"""The FP8 decode kernel of Hopper chips."""
