"""Whether a sequence group has a cache."""

from collections.abc import Mapping, Sequence

from ...contract.sequence_classes import BlockTables


def is_block_tables_empty(block_tables: BlockTables | Sequence[int] | None) -> bool:
    """Return whether a group has no cache: no tables, or None for every sequence.

    Args:
        block_tables: rows of block ids by sequence id. An empty row counts as a row, and so does
            anything that is not a mapping.

    Source:
        vLLM's function of that name. A profile run has no tables.

    Example:
        >>> is_block_tables_empty({0: None, 1: None}), is_block_tables_empty({0: []})
        (True, False)
    """
    if block_tables is None:
        return True
    if not isinstance(block_tables, Mapping):
        return False
    return all(row is None for row in block_tables.values())
