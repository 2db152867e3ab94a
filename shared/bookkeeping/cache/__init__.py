"""Cache operations that need no twin."""
