"""Puzzle 3: the keys and values of a sequence, gathered from the cache."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ....contract.operations import load_implementation
from ..puzzle import Case, Function, Hint, Puzzle, counted

UNUSED = 99
"""Block id in entries that are not in use. The caches of the cases have 3 blocks."""
TEMPLATE = '''\
"""Puzzle 3: gather a sequence from the cache.

Attention needs the keys and values of a whole sequence in order. In the cache they are in
blocks, and the sequence's row of the block table says in which ones.
"""

import torch
from torch import Tensor


def gather(
    key_cache: Tensor, value_cache: Tensor, block_row: Tensor, seq_len: int
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of one sequence, in order.

    The tensors may have any strides: they need not be contiguous.

    Args:
        key_cache: [num_blocks, block_size, kv_heads, head_size].
        value_cache: [num_blocks, block_size, kv_heads, head_size].
        block_row: [max_blocks] int32 block ids in order. Entries past the end of the
            sequence are not in use and may hold any number.
        seq_len: tokens of the sequence.

    Returns:
        Keys and values, each [seq_len, kv_heads, head_size].

    Example:
        The cache has 3 blocks of 2 slots with the keys 0 1 | 2 3 | 4 5. The sequence of 3
        tokens is in blocks 2 and 0: both slots of block 2, and the first slot of block 0.

        >>> key_cache = torch.arange(6.0).view(3, 2, 1, 1)
        >>> value_cache = key_cache + 10
        >>> block_row = torch.tensor([2, 0, 99], dtype=torch.int32)
        >>> key, value = gather(key_cache, value_cache, block_row, seq_len=3)
        >>> key.flatten()
        tensor([4., 5., 0.])
        >>> value.flatten()
        tensor([14., 15., 10.])
    """
    raise NotImplementedError
'''


def right(
    key_cache: Tensor, value_cache: Tensor, block_row: Tensor, seq_len: int
) -> tuple[Tensor, Tensor]:
    """Return the reference's keys and values."""
    found: tuple[Tensor, Tensor] = load_implementation("reference").gather_cache(
        key_cache,
        value_cache,
        block_row[None],
        torch.tensor([0, seq_len], dtype=torch.int32),
        seq_len,
    )
    return found


def cases() -> Iterator[Case]:
    """Yield every sequence of at most 5 tokens in blocks of 1 to 3 slots, the shortest first."""
    for heads, size in ((1, 1), (2, 1), (1, 2)):
        for seq_len in (1, 2, 3, 4, 5, 6, 0):
            for block_size in (2, 1, 3):
                needed = -(-seq_len // block_size)
                ids = [2, 0, 1]
                if needed > len(ids):
                    continue
                row = [*ids[:needed], UNUSED]
                cache = counted(3, block_size, heads, size, start=0)
                yield {
                    "key_cache": cache,
                    "value_cache": cache + 30,
                    "block_row": torch.tensor(row, dtype=torch.int32),
                    "seq_len": seq_len,
                }


def in_slot_order(**case: Any) -> tuple[Tensor, Tensor]:
    """Return the first slots of the cache."""
    caches = case["key_cache"], case["value_cache"]
    key, value = (cache.flatten(0, 1)[: case["seq_len"]] for cache in caches)
    return key, value


def blocks_of(case: Case, count: int) -> tuple[Tensor, Tensor]:
    """Return all slots of the first blocks of the row."""
    ids = case["block_row"][:count].long()
    key, value = (
        case[name][ids].flatten(0, 1) for name in ("key_cache", "value_cache")
    )
    return key, value


def whole_blocks(**case: Any) -> tuple[Tensor, Tensor]:
    """Return the slots past the end of the sequence too."""
    return blocks_of(case, -(-case["seq_len"] // case["key_cache"].shape[1]))


def full_blocks(**case: Any) -> tuple[Tensor, Tensor]:
    """Leave out the last block if it is not full."""
    return blocks_of(case, case["seq_len"] // case["key_cache"].shape[1])


def whole_row(**case: Any) -> tuple[Tensor, Tensor]:
    """Use the entries that are not in use."""
    return blocks_of(case, len(case["block_row"]))


def sorted_blocks(**case: Any) -> tuple[Tensor, Tensor]:
    """Read the blocks in the order of their ids."""
    row = case["block_row"].sort().values
    return right(case["key_cache"], case["value_cache"], row, case["seq_len"])


def keys_twice(**case: Any) -> tuple[Tensor, Tensor]:
    """Return the keys as values."""
    key, _ = right(**case)
    return key, key


def entry_per_token(**case: Any) -> tuple[Tensor, Tensor]:
    """Take one entry of the row per token."""
    positions = torch.arange(case["seq_len"])
    ids = case["block_row"][positions].long()
    offsets = positions % case["key_cache"].shape[1]
    return case["key_cache"][ids, offsets], case["value_cache"][ids, offsets]


def operations(function: Function) -> dict[str, Function]:
    """Return pagetwin's operation, which calls the function once per sequence."""

    def gather_cache(
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        seq_start_loc: Tensor,
        num_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        key = key_cache.new_zeros(num_tokens, *key_cache.shape[2:])
        value = value_cache.new_zeros(num_tokens, *value_cache.shape[2:])
        starts = seq_start_loc.tolist()
        for req, row in enumerate(block_table):
            own = slice(starts[req], starts[req + 1])
            key[own], value[own] = function(
                key_cache, value_cache, row, own.stop - own.start
            )
        return key, value

    return {"gather_cache": gather_cache}


PUZZLE = Puzzle(
    number=3,
    name="gather",
    title="the keys and values of a sequence",
    page="concepts/cache_ops",
    template=TEMPLATE,
    results={
        "key": ("token", "head", "element"),
        "value": ("token", "head", "element"),
    },
    cases=cases,
    right=right,
    hints=(
        Hint(
            "no_table",
            "These are the first slots of the cache. They belong to other sequences: the block"
            " row says which blocks belong to this one.",
            in_slot_order,
        ),
        Hint(
            "padding_read",
            "The result has all slots of the last block. A block is allocated as a whole, but"
            " the sequence may end inside it.",
            whole_blocks,
        ),
        Hint(
            "block_edge",
            "The last block is missing when it is not full. The number of blocks is seq_len /"
            " block_size, rounded up.",
            full_blocks,
        ),
        Hint(
            "unused_entry",
            "An entry past the end of the sequence was used as a block id. Such entries may"
            " hold any number. Compute first how many entries the sequence needs.",
            whole_row,
        ),
        Hint(
            "order",
            "The blocks are in the order of their ids. The order of the sequence is the order"
            " of the entries in the row.",
            sorted_blocks,
        ),
        Hint(
            "entry_per_token",
            "Each token took an entry of its own. An entry serves block_size consecutive"
            " positions.",
            entry_per_token,
        ),
        Hint(
            "values",
            "The keys are right. The values must come from the value cache.",
            keys_twice,
        ),
    ),
    idea="It is puzzle 1 in the other direction: for each position find the block and the"
    " offset, then read instead of write.",
    operations=operations,
    laws=("a gathered sequence is its slots in order",),
    law_hint="The small cases are right. Here caches have other dtypes and strides, and a"
    " sequence may be empty.",
)
