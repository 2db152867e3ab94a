"""Models of the library: their positions, dtypes and attention, and whether steps are exact."""
