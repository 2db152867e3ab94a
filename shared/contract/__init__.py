"""What both implementations obey: operations, shapes, kinds, specs, metadata classes, budgets."""
