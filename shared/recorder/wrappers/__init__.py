"""What the recorder wraps: operations of an implementation, and attention backends."""
