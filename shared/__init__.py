"""What both twins obey: shapes, metadata classes, refusals, budgets, replay, commands."""
