"""Calls of drawn batches: the tensors of a `SignedBatch`, made on the device that reads them.

A process draws normal numbers once. A batch takes a part of them, selected by its seed. Block ids
and indices are computed by numpy for all requests at once. So a batch takes a few operations of
torch, however many requests it has, and nothing waits for the device.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...validation.option import Drawing
from .batches import GARBAGE, NAN, empty_cache, heads_of
from .drawn_numbers import CPU, NUMBERS, Ints, Numbers, bits, moved, rows_of, to_device
from .options import DTYPES, Call, make_options
from .signatures import SignedBatch

NEEDLE_SCORE = 24.0
"""Score of a needle: its weight is e**24 times that of a key with the score 0."""
WEIGHTS = np.array([[1, 0], [0.25, 2]], dtype=np.float32).reshape(2, 2, 1, 1, 1)
"""Factors of a query and of the direction of its needle: without a needle, and with one."""


@dataclass(frozen=True)
class SignedCall:
    """The call of a batch, and what it means, on the device of the candidate.

    Args:
        call: The call.
        query: [tokens, query_heads, head_size] the live rows of the query.
        keys, values: [all keys, kv_heads, size] what the cache stores for each request, request
            after request. No tensor of the call shares their memory.
    """

    call: Call
    query: Tensor
    keys: Tensor
    values: Tensor


def build_signed(batch: SignedBatch, device: torch.device) -> SignedCall:
    """Return the tensors of a batch.

    Everything that must not be read is poisoned, as in `batches.build`. Equal batches give equal
    tensors, on each device.
    """
    signature, choice = batch.signature, batch.signature.choice
    kv_heads, heads = signature.kv_heads, signature.kv_heads * int(choice["group"])
    dtype = DTYPES[choice["dtype"]]
    arguments: dict[str, Any] = {}
    if choice["scale"] != "none":
        arguments["scale"] = float(choice["scale"])
    scales = _scales(choice["scales"], kv_heads)
    if scales is not None:
        arguments |= {"k_scale": scales[0], "v_scale": scales[1]}

    # step: draw queries, keys and values, with needles among the keys
    generator = np.random.default_rng(batch.seed)
    numbers = Numbers(int(generator.integers(NUMBERS)), device)
    query, keys, values = _draw_numbers(batch, numbers, scales or (1.0, 1.0))

    # step: store them in the chosen layout
    arguments |= {
        "query": _store_query(batch, query),
        "query_start_loc": to_device(_starts(batch.query_lens), device),
        "max_query_len": max(signature.max_query_len, *batch.query_lens),
    }
    rows: list[list[int]] = []
    if signature.is_paged:
        stored, rows, (keys, values) = _store_paged(batch, (keys, values), generator)
        arguments |= stored
    else:
        arguments |= _store_ragged(batch, (keys, values))

    # step: make the options
    pick = Random(batch.seed)
    lens = batch.query_lens, batch.key_lens
    arguments |= make_options(choice, Drawing(pick, *lens, heads, batch.padding, CPU))
    given = {"given": dtype, "made": None}
    out_dtype = given.get(choice["out"], DTYPES.get(choice["out"]))
    if out_dtype not in (None, dtype):
        number = pick.choice([0.01, 0.05])
        kind = signature.seed % 3
        arguments["out_scale"] = (
            torch.tensor([number] if kind == 2 else number) if kind else number
        )
    for name, each in arguments.items():
        if isinstance(each, Tensor) and each.device != device:
            arguments[name] = moved(each, device)
    call = Call(
        operation=choice["operation"],
        arguments=arguments,
        dtype=dtype,
        out_dtype=out_dtype,
        wants_lse=choice["lse"] == "given",
        query_lens=batch.query_lens,
        key_lens=batch.key_lens,
        rows=rows,
    )
    return SignedCall(signature.views.of(call), query, keys, values)


def _scales(kind: str, kv_heads: int) -> tuple[Tensor | float, Tensor | float] | None:
    """Return the scales of keys and of values of an FP8 cache."""
    if kind == "none":
        return None
    if kind == "numbers":
        return 0.11, 0.023
    if kind == "one element":
        return torch.tensor(0.11), torch.tensor([0.023])
    steps = torch.arange(1.0, kv_heads + 1)
    return 0.11 * steps, 0.023 / steps


def _draw_numbers(
    batch: SignedBatch, numbers: Numbers, scales: tuple[Tensor | float, Tensor | float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, and keys and values as they are stored.

    Queries with a needle have a component of length 2 along a direction; the needle has the
    direction, and the length that makes the score NEEDLE_SCORE. Its value is larger by 3.
    """
    choice, kv_heads = batch.signature.choice, batch.signature.kv_heads
    group, size = int(choice["group"]), int(choice["head_size"])
    dtype, device = DTYPES[choice["dtype"]], numbers.device
    stored = dtype if choice["cache"] == "as the query" else DTYPES[choice["cache"]]
    wide = torch.float32 if stored.itemsize == 1 else stored
    value_size = size if choice["value_head_size"] == "as the keys" else size + 5
    factor = size**-0.5 if choice["scale"] == "none" else float(choice["scale"])
    total = sum(batch.key_lens)
    lean = numbers.take((kv_heads, size), torch.float32, CPU)
    query = numbers.take((sum(batch.query_lens), kv_heads * group, size), dtype)
    keys = numbers.take((total, kv_heads, size), wide)
    values = numbers.take((total, kv_heads, value_size), wide)
    needles = np.array(batch.needles)
    if max(batch.needles, default=-1) >= 0:
        norms = torch.linalg.vector_norm(lean, dim=1, keepdim=True)
        lean = lean / norms.clamp_min_(1e-12)
        has = needles >= 0
        at = needles + np.cumsum(batch.key_lens) - batch.key_lens
        index = to_device(at[has], device)
        needle = moved((NEEDLE_SCORE / 2 / factor * lean).to(wide), device)
        keys = keys.index_put((index,), needle)
        values = values.index_put((index,), values.index_select(0, index) + 3)
        row_has = has.repeat(batch.query_lens)[:, None, None]
        weight = to_device(np.where(row_has, WEIGHTS[1], WEIGHTS[0]), device)
        kept, added = weight.to(dtype).unbind()
        direction = moved(lean.repeat_interleave(group, 0).to(dtype), device)
        query = (query * kept).addcmul_(added, direction)
    if stored.itemsize == 1:
        most = torch.finfo(stored).max
        keys, values = (
            (each / _column(scale, device)).clamp_(-most, most).to(stored)
            for each, scale in zip((keys, values), scales, strict=True)
        )
    return query, keys, values


def _column(scale: Tensor | float, device: torch.device) -> Tensor | float:
    """Return a scale that broadcasts over [..., kv_heads, size]."""
    return moved(scale.view(-1, 1), device) if isinstance(scale, Tensor) else scale


def _store_query(batch: SignedBatch, query: Tensor) -> Tensor:
    """Return the queries with padding rows, in a tensor of their own."""
    tokens, heads, size = query.shape
    wide = own = heads * size
    if batch.signature.choice["query"] == "fused":
        wide += 2 * batch.signature.kv_heads * size
    rows = query.new_empty(tokens + batch.padding, wide)
    if wide > own:
        rows[:, own:] = NAN
    stored = heads_of(rows[:, :own], heads)
    if not batch.padding:
        return stored.copy_(query)
    # for odd seeds finite padding rows, as an earlier step leaves them
    rows[tokens:] = 0.5 if batch.seed % 2 else NAN
    stored[:tokens] = query
    return stored


def empty_pair(
    batch: SignedBatch, num_blocks: int, block_size: int, pair: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """Return caches for keys and values, full of poison. e4m3 has no infinity."""
    layout, (keys, values) = batch.signature.choice["layout"], pair
    dtype, content = keys.dtype, NAN
    if batch.poison == "inf" and dtype != torch.float8_e4m3fn:
        content = torch.inf
    elif batch.poison != "nan":
        content = torch.finfo(dtype).max

    def empty(size: int) -> Tensor:
        shape = num_blocks, block_size, batch.signature.kv_heads, size
        return empty_cache(layout, *shape, dtype, keys.device, content)

    first = empty(keys.shape[2])
    is_one = keys.shape[2] == values.shape[2]
    return [first[0], first[1] if is_one else empty(values.shape[2])[1]]


def _store_paged(
    batch: SignedBatch, pair: tuple[Tensor, Tensor], generator: np.random.Generator
) -> tuple[dict[str, Any], list[list[int]], tuple[Tensor, Tensor]]:
    """Return the arguments with the keys and values in blocks, the blocks, and what they store."""
    signature, size = batch.signature, batch.signature.block_size
    device = pair[0].device
    key_lens = np.array(batch.key_lens)
    counts = -(-key_lens // size)
    max_blocks = max(1, -(-signature.max_key_len // size), int(counts.max()))
    table, num_blocks = draw_table(batch, counts, max_blocks, generator)
    request, position = rows_of(key_lens)
    slots = table[request, position // size].astype(np.int64) * size + position % size
    if batch.table != "scattered":
        # blocks that are stored twice keep the content that was stored last
        last = np.zeros(num_blocks * size, dtype=np.int64)
        last[slots] = np.arange(len(slots))
        kept = to_device(last[slots], device)
        keys, values = (
            bits(each).index_select(0, kept).view(each.dtype) for each in pair
        )
        pair = keys, values
    at = to_device(np.array(np.divmod(slots, size)), device).unbind()
    caches = empty_pair(batch, num_blocks, size, pair)
    for cached, numbers in zip(caches, pair, strict=True):
        bits(cached)[at] = bits(numbers)
    arguments = {
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_table": to_device(table, device),
        "seq_lens": to_device(key_lens.astype(np.int32), device),
        "max_seq_len": max(signature.max_key_len, *batch.key_lens),
    }
    rows = [row[:count].tolist() for row, count in zip(table, counts, strict=True)]
    return arguments, rows, pair


def draw_table(
    batch: SignedBatch, counts: Ints, max_blocks: int, generator: np.random.Generator
) -> tuple[NDArray[np.int32], int]:
    """Return a block table with scattered ids, and the number of blocks (3 per entry, plus 1).

    Entries past the end of each row are garbage.
    """
    num_blocks = 3 * int(counts.sum()) + 1
    ids = generator.permutation(num_blocks)[: counts.sum()].astype(np.int32)
    used = np.arange(max_blocks) < counts[:, None]
    blocks = np.zeros(used.shape, dtype=np.int32)
    blocks[used] = ids
    if batch.table == "shared prefix":
        shared = np.minimum(counts, counts[0])[:, None] // 2
        shared[0] = 0
        blocks = np.where(np.arange(max_blocks) < shared, blocks[:1], blocks)
    if batch.table == "repeated block":
        several = np.flatnonzero(counts > 1)
        blocks[several, counts[several] - 1] = blocks[several, 0]
    garbage = {
        "far outside": np.array(GARBAGE),
        "first block": np.zeros(1),
        "of another request": blocks[used] if len(ids) else np.zeros(1),
    }[batch.entries]
    past = np.resize(garbage, max_blocks).astype(np.int32)
    return np.where(used, blocks, past), num_blocks


def _store_ragged(batch: SignedBatch, pair: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Return the arguments that hold the keys and values one after another."""
    total = len(pair[0])
    ragged = empty_pair(batch, 1, total + batch.padding, pair)
    for tensor, numbers in zip(ragged, pair, strict=True):
        tensor[0, :total] = numbers
    return {
        "key": ragged[0][0],
        "value": ragged[1][0],
        "key_start_loc": to_device(_starts(batch.key_lens), pair[0].device),
        "max_key_len": max(batch.signature.max_key_len, *batch.key_lens),
    }


def _starts(lens: tuple[int, ...]) -> NDArray[np.int32]:
    """Return [reqs + 1] the first row of each request, and the total."""
    return np.cumsum([0, *lens]).astype(np.int32)
