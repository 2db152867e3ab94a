"""Harness that runs the laws: candidate, worker process, shrinking, report."""
