"""The contract of both twins: operations, shapes, kinds, specs, metadata classes, budgets."""
