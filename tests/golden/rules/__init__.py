"""The rules by area. The modules register them on import."""
