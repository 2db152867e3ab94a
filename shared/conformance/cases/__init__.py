"""Hypothesis strategies: batches, caches, steps and options on which the laws are tried."""

from ...contract.extras import require

require("pagetwin.conformance", "hypothesis")
