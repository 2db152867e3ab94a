"""The host side of kernel launches: dispatch, plans, tuning tables, workspace."""
