"""Ladder of kernels: what makes a paged attention kernel fast, one change at a time.

Each rung is a complete kernel that changes one thing of the rung below. All are held to the same
error budgets and timed on the same batches, those that gained nothing too. `rungs.py` lists them.
The program tests/benchmarks/ladder/run.py checks and times them on a GPU, and the pages under
docs/ladder show the results.
"""
