"""Puzzle 12: a Triton kernel for decode over the paged cache."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..puzzle import Case, Function, Hint, Puzzle, counted, small_numbers
from .attention import attend_each, with_nan

TEMPLATE = '''\
"""Puzzle 12: a Triton kernel for decode.

Each request brings one query, which attends to all tokens of its sequence in the paged
cache. One program computes one query head of one request: it goes through the blocks of
the sequence and keeps an online softmax. The check runs it in Triton's interpreter, without
a GPU. There print() works inside the kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def decode_kernel(
    query,  # [reqs, query_heads, HEAD_SIZE]
    key_cache,  # [num_blocks, BLOCK_SIZE, kv_heads, HEAD_SIZE]
    value_cache,  # [num_blocks, BLOCK_SIZE, kv_heads, HEAD_SIZE]
    block_table,  # [reqs, max_blocks] int32, entries past the end of a row hold any number
    seq_lens,  # [reqs] int32, at least 1
    output,  # [reqs, query_heads, HEAD_SIZE], written
    scale,  # factor of the scores
    query_heads,  # a multiple of kv_heads
    kv_heads,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,  # a power of 2
    HEAD_SIZE: tl.constexpr,  # a power of 2
):
    """Write the attention of one query head of one request: its row of output.

    The arguments are pointers to contiguous tensors: element [i, j, k] of query is at
    query + (i * query_heads + j) * HEAD_SIZE + k. Slots that hold no token can be NaN.

    Example:
        2 query heads, 1 KV head, HEAD_SIZE 1, BLOCK_SIZE 2, seq_lens [3], block_table
        [[2, 0]]. Program (0, 1) computes head 1 of request 0. Its keys are the two slots of
        block 2 and the first slot of block 0; the second slot of block 0 is masked. With
        scores 0, 0 and ln 2 = 0.6931 and values 4, 8, 2 the weights are 1/4, 1/4, 1/2, so
        it writes 1 + 2 + 1 = 4 to output + 1.
    """
    req = tl.program_id(0)
    head = tl.program_id(1)
    raise NotImplementedError


def decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """Launch one program per request and query head. This function is complete."""
    reqs, query_heads, head_size = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    output = torch.full_like(query, float("nan"))
    decode_kernel[(reqs, query_heads)](
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        output,
        scale,
        query_heads,
        kv_heads,
        block_table.shape[1],
        BLOCK_SIZE=block_size,
        HEAD_SIZE=head_size,
    )
    return output
'''


Sizes = tuple[tuple[int, ...], int, int, int, int]
SHAPES: tuple[Sizes, ...] = (
    ((1,), 1, 1, 1, 1),
    ((2,), 2, 1, 1, 1),
    ((2,), 1, 1, 1, 1),
    ((1,), 2, 1, 1, 1),
    ((3,), 2, 1, 1, 1),
    ((4,), 2, 1, 1, 1),
    ((5,), 2, 1, 1, 2),
    ((5,), 4, 1, 1, 1),
    ((2,), 2, 1, 2, 1),
    ((2,), 2, 2, 1, 1),
    ((2,), 2, 2, 2, 1),
    ((3,), 2, 2, 2, 2),
    ((1, 2), 1, 1, 1, 1),
    ((2, 1), 2, 1, 1, 2),
    ((1, 5, 3), 2, 2, 2, 4),
    ((4, 3), 4, 2, 3, 2),
)
"""Sequence lengths, block size, KV heads, query heads per KV head, and head size."""


def cases() -> Iterator[Case]:
    """Yield sequences of 1 to 5 tokens, then more heads and rows, then NaN in unused slots."""
    for sizes in SHAPES:
        yield case_of(sizes, is_poisoned=False)
    for sizes in SHAPES[3:8]:
        yield case_of(sizes, is_poisoned=True)


def case_of(sizes: Sizes, is_poisoned: bool) -> Case:
    """Return a batch with scattered blocks; if poisoned, with NaN in slots without a token."""
    lens, block_size, kv_heads, group, size = sizes
    needed = [-(-length // block_size) for length in lens]
    num_blocks = sum(needed) + 2
    ids = [(3 * block + 2) % num_blocks for block in range(num_blocks)]
    if len(set(ids)) < num_blocks:
        ids = list(range(num_blocks))[::-1]
    seed = 100 * sum(lens) + 10 * block_size + 3 * kv_heads + group + size
    shape = (num_blocks, block_size, kv_heads, size)
    keys, values = small_numbers(*shape, seed=seed), counted(*shape)
    held = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    width = max(needed) + 1
    # the last block has no token and its id is in the entries that are not in use
    table = torch.full((len(lens), width), ids[-1], dtype=torch.int32)
    for req, (length, count) in enumerate(zip(lens, needed, strict=True)):
        own, ids = ids[:count], ids[count:]
        table[req, :count] = torch.tensor(own)
        for place in range(length):
            held[own[place // block_size], place % block_size] = True
    return {
        "query": small_numbers(len(lens), kv_heads * group, size, seed=seed, low=1),
        "key_cache": with_nan(keys, ~held & is_poisoned),
        "value_cache": with_nan(values, ~held & is_poisoned),
        "block_table": table,
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "scale": 0.5,
    }


def slots_of(case: Case, lens: list[int]) -> list[Tensor]:
    """Return the slots of the first positions of each request."""
    size = case["key_cache"].shape[1]
    found = []
    for row, length in zip(case["block_table"].long(), lens, strict=True):
        positions = torch.arange(length)
        found.append(row[positions // size] * size + positions % size)
    return found


def over_slots(case: Case, slots: list[Tensor]) -> Tensor:
    """Return attention of each request to some slots."""
    queries = list(case["query"][:, None])
    keys, values = (
        [case[name].flatten(0, 1)[own] for own in slots]
        for name in ("key_cache", "value_cache")
    )
    return attend_each(queries, keys, values, case["scale"])[0]


def right(**case: Any) -> Tensor:
    """Return the oracle's attention."""
    return over_slots(case, slots_of(case, case["seq_lens"].tolist()))


def padding(**case: Any) -> Tensor:
    """Attend to all slots of the last block."""
    size = case["key_cache"].shape[1]
    lens = [-(-length // size) * size for length in case["seq_lens"].tolist()]
    return over_slots(case, slots_of(case, lens))


def nan_values(**case: Any) -> Tensor:
    """Multiply masked values by 0."""
    is_ragged = case["seq_lens"] % case["key_cache"].shape[1] != 0
    is_ragged &= bool(case["value_cache"].isnan().any())
    return with_nan(right(**case), is_ragged)


def full_blocks(**case: Any) -> Tensor:
    """Leave out the last block if it is not full. The result over no key is 0 / 0."""
    size = case["key_cache"].shape[1]
    lens = [length // size * size for length in case["seq_lens"].tolist()]
    found = over_slots(case, slots_of(case, lens))
    return with_nan(found, torch.tensor(lens) == 0)


def one_short(**case: Any) -> Tensor:
    """Leave out the last token. The result over no key is 0 / 0."""
    lens = [length - 1 for length in case["seq_lens"].tolist()]
    found = over_slots(case, slots_of(case, lens))
    return with_nan(found, torch.tensor(lens) == 0)


def no_table(**case: Any) -> Tensor:
    """Read the first slots of the cache."""
    return over_slots(
        case, [torch.arange(length) for length in case["seq_lens"].tolist()]
    )


def first_row(**case: Any) -> Tensor:
    """Use the first row of the block table for all requests."""
    table = case["block_table"][:1].expand_as(case["block_table"])
    return right(**(case | {"block_table": table}))


def head_order(**case: Any) -> Tensor:
    """Use KV head `head % kv_heads`."""
    heads, kv_heads = case["query"].shape[1], case["key_cache"].shape[2]
    used = [head % kv_heads for head in range(heads)]
    caches = {name: case[name][:, :, used] for name in ("key_cache", "value_cache")}
    return right(**(case | caches))


def scaled(change: Any) -> Function:
    """Return a wrong answer with another scale."""

    def wrong(**case: Any) -> Tensor:
        return right(**(case | {"scale": change(case["scale"])}))

    return wrong


def by_blocks(case: Case, is_acc: bool, is_sum: bool) -> Tensor:
    """Return an online softmax in which a sum keeps its old scale when the maximum rises."""
    block_size, kv_heads = case["key_cache"].shape[1:3]
    out = torch.zeros_like(case["query"])
    group = case["query"].shape[1] // kv_heads
    for req, slots in enumerate(slots_of(case, case["seq_lens"].tolist())):
        keys, values = (
            case[name].flatten(0, 1)[slots].repeat_interleave(group, 1)
            for name in ("key_cache", "value_cache")
        )
        scores = torch.einsum("hd,khd->hk", case["query"][req], keys) * case["scale"]
        running = torch.stack(
            [
                scores[:, : (place // block_size + 1) * block_size].amax(1)
                for place in range(len(slots))
            ],
            1,
        )
        last = running[:, -1:]
        acc = torch.exp(scores - (last if is_acc else running))
        total = torch.exp(scores - (last if is_sum else running)).sum(1)
        out[req] = torch.einsum("hk,khd->hd", acc, values) / total[:, None]
    return out


def rescaled(is_acc: bool, is_sum: bool) -> Function:
    """Return a wrong answer without one or both of the rescalings."""
    return lambda **case: by_blocks(case, is_acc, is_sum)


def not_written(**case: Any) -> Tensor:
    """Leave the output unwritten."""
    return torch.full_like(case["query"], torch.nan)


RESCALE = (
    "A block raised the maximum, and a running value kept its old scale. Rescale sum and"
    " accumulator by alpha = exp(old maximum - new maximum), as in puzzle 6."
)
PUZZLE = Puzzle(
    number=12,
    name="decode",
    title="a Triton kernel for decode",
    page="ladder/decode",
    template=TEMPLATE,
    results={"output": ("request", "head", "element")},
    cases=cases,
    right=right,
    has_strides=False,
    hints=(
        Hint(
            "not_written",
            "No element was written: the output still holds the NaN that it was filled with."
            " tl.store takes the address of this program's row.",
            not_written,
        ),
        Hint(
            "padding_read",
            "Slots past the end of the sequence have weight. Compare the position of each slot"
            " with seq_lens[req], and give masked keys the score -inf.",
            padding,
        ),
        Hint(
            "nan_times_zero",
            "Masked slots have weight 0, but their values can be NaN, and 0 * NaN is NaN. Load"
            " them with a mask and other=0.",
            nan_values,
        ),
        Hint(
            "block_edge",
            "The last block is missing when it is not full. Round the number of blocks up, and"
            " mask inside the last one.",
            full_blocks,
        ),
        Hint(
            "last_token",
            "The last token is missing. Positions 0 to seq_len - 1 are visible.",
            one_short,
        ),
        Hint(
            "no_table",
            "The kernel reads the first slots of the cache. The id of each block is in the"
            " request's row of the block table.",
            no_table,
        ),
        Hint(
            "first_row",
            "All requests use row 0 of the block table. A row has max_blocks entries.",
            first_row,
        ),
        Hint(
            "head_order",
            "The KV head is head % kv_heads. Consecutive query heads share a KV head, as in"
            " puzzle 7: divide by the size of a group.",
            head_order,
        ),
        Hint(
            "scale_divided",
            "The scores were divided by the scale. It is a factor: multiply by it.",
            scaled(lambda scale: 1 / scale),
        ),
        Hint(
            "scale_missing",
            "The result is that of scale 1. Multiply the scores by the scale.",
            scaled(lambda scale: 1.0),
        ),
        Hint("rescale_acc", RESCALE, rescaled(False, True)),
        Hint("rescale_sum", RESCALE, rescaled(True, False)),
        Hint("rescale", RESCALE, rescaled(False, False)),
    ),
    idea="Follow one program: which row of the block table, which blocks, which slots are"
    " visible? Print the scores in the kernel and compare them with your own.",
)
