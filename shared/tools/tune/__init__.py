"""Command `pagetwin tune`: the batches that are timed, the clock, and what is printed."""
