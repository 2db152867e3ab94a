"""What a call must not reach and must not change, and memory after which it must not read."""
