"""Repeated calls and cache writes: recorded launches, made again with other addresses."""
