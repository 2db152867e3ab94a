"""What all parts of the suite use: the declared support, results, and the call that is judged."""
