"""Replay: real serving traffic, run step by step on several implementations and compared."""
