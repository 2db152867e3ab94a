"""Fixed splits of a sequence's keys: which rank stores a split, and where."""

from ...reference.parallel.key_splits import (
    offsets_of_runs,
    order_of_partials,
    stored_splits,
)

__all__ = ["offsets_of_runs", "order_of_partials", "stored_splits"]
