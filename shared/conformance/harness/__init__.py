"""What runs the laws: candidate, worker process, shrinking, report."""
