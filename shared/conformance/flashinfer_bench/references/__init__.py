"""References of the definitions: one file of plain torch per kind of operation."""
