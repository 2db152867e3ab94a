"""Command line tools: explain, replay, bench, check."""
