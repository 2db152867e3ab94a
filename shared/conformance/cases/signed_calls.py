"""Calls of drawn batches: the tensors of a `SignedBatch`, made on the device that reads them.

A process draws normal numbers once. A batch takes a part of them, selected by its seed. Block ids
and indices are computed by numpy for all requests at once. So a batch takes a few operations of
torch, however many requests it has, and nothing waits for the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...validation.option import Drawing
from .batches import GARBAGE, NAN, empty_cache, heads_of
from .drawn_numbers import CPU, NUMBERS, Ints, Numbers, bits, moved_together, rows_of
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
    arguments["query_start_loc"] = _starts(batch.query_lens)
    arguments["max_query_len"] = max(signature.max_query_len, *batch.query_lens)

    # step: draw needles and blocks
    generator = np.random.default_rng(batch.seed)
    numbers = Numbers(int(generator.integers(NUMBERS)), device)
    host = _draw_needles(batch, numbers)
    blocks: Blocks | None = None
    if signature.is_paged:
        blocks = _draw_blocks(batch, generator)
        host |= blocks.host
        arguments |= blocks.arguments
    else:
        arguments["key_start_loc"] = _starts(batch.key_lens)
        arguments["max_key_len"] = max(signature.max_key_len, *batch.key_lens)

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

    # step: copy all of this to the device at once
    tensors = {name: v for name, v in arguments.items() if isinstance(v, Tensor)}
    there = moved_together(host | tensors, device)
    arguments |= {name: there[name] for name in tensors}

    # step: draw queries, keys and values there, and store them in the chosen layout
    query, parts = _draw_numbers(batch, numbers, there)
    if scales is not None:
        scales = arguments["k_scale"], arguments["v_scale"]
    parts = _quantised(batch, parts, scales or (1.0, 1.0))
    if "kept" in there:
        kept = there["kept"]
        parts = [bits(part).index_select(1, kept).view(part.dtype) for part in parts]
    arguments["query"] = _store_query(batch, query)
    arguments |= _store_keys(batch, parts, blocks, there)
    call = Call(
        operation=choice["operation"],
        arguments=arguments,
        dtype=dtype,
        out_dtype=out_dtype,
        wants_lse=choice["lse"] == "given",
        query_lens=batch.query_lens,
        key_lens=batch.key_lens,
        rows=[] if blocks is None else blocks.rows,
    )
    return SignedCall(signature.views.of(call), query, parts[0][0], parts[-1][-1])


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


def _stored_dtype(batch: SignedBatch) -> torch.dtype:
    """Return the dtype of the stored keys and values."""
    choice = batch.signature.choice
    is_alike = choice["cache"] == "as the query"
    return DTYPES[choice["dtype"] if is_alike else choice["cache"]]


def _drawn_dtype(batch: SignedBatch) -> torch.dtype:
    """Return the dtype in which keys and values are drawn."""
    stored = _stored_dtype(batch)
    return torch.float32 if stored.itemsize == 1 else stored


def _draw_needles(batch: SignedBatch, numbers: Numbers) -> dict[str, Tensor]:
    """Return what makes needles of keys, on the host; nothing if the batch has no needle.

    Queries with a needle have a component of length 2 along a direction; the needle has the
    direction, and the length that makes the score NEEDLE_SCORE. Its value is larger by 3.

    Returns:
        `at`: [needles] their rows among the keys. `needle`: [kv_heads, head_size] each of these
        keys. `larger`: what is added to their values. `weights`: [2, tokens, 1, 1] the factors of
        the queries and of `direction`, [query_heads, head_size].
    """
    choice, kv_heads = batch.signature.choice, batch.signature.kv_heads
    group, size = int(choice["group"]), int(choice["head_size"])
    dtype, wide = DTYPES[choice["dtype"]], _drawn_dtype(batch)
    lean = numbers.take((kv_heads, size), torch.float32, CPU)
    if max(batch.needles, default=-1) < 0:
        return {}
    factor = size**-0.5 if choice["scale"] == "none" else float(choice["scale"])
    needles = np.array(batch.needles)
    has = needles >= 0
    at = needles + np.cumsum(batch.key_lens) - batch.key_lens
    row_has = has.repeat(batch.query_lens)[:, None, None]
    weights = np.where(row_has, WEIGHTS[1], WEIGHTS[0])
    norms = torch.linalg.vector_norm(lean, dim=1, keepdim=True)
    lean = lean / norms.clamp_min_(1e-12)
    return {
        "at": torch.from_numpy(at[has]),
        "needle": (NEEDLE_SCORE / 2 / factor * lean).to(wide),
        "larger": torch.tensor(3.0, dtype=wide),
        "weights": torch.from_numpy(weights).to(dtype),
        "direction": lean.repeat_interleave(group, 0).to(dtype),
    }


def _draw_numbers(
    batch: SignedBatch, numbers: Numbers, there: Mapping[str, Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return queries, and the parts of keys and values before they are quantised.

    Args:
        batch: The batch.
        numbers: Where they are taken.
        there: What `_draw_needles` returns, on the device.

    Returns:
        [tokens, query_heads, head_size], and one part [2, all keys, kv_heads, size] with keys and
        values. If the sizes of keys and values differ, two parts [1, all keys, kv_heads, size].
    """
    choice, kv_heads = batch.signature.choice, batch.signature.kv_heads
    size, wide = int(choice["head_size"]), _drawn_dtype(batch)
    heads, total = kv_heads * int(choice["group"]), sum(batch.key_lens)
    query = numbers.take((sum(batch.query_lens), heads, size), DTYPES[choice["dtype"]])
    shapes = [(2, total, kv_heads, size)]
    if choice["value_head_size"] != "as the keys":
        shapes = [(1, total, kv_heads, width) for width in (size, size + 5)]
    parts = [numbers.take(shape, wide) for shape in shapes]
    if "at" in there:
        parts = [part.clone() for part in parts]
        keys, values = parts[0][0], parts[-1][-1]
        at = there["at"]
        keys.index_copy_(0, at, there["needle"].expand(len(at), *keys.shape[1:]))
        values.index_add_(0, at, there["larger"].expand(len(at), *values.shape[1:]))
        kept, added = there["weights"].unbind()
        query = (query * kept).addcmul_(added, there["direction"])
    return query, parts


def _quantised(
    batch: SignedBatch,
    parts: list[Tensor],
    scales: tuple[Tensor | float, Tensor | float],
) -> list[Tensor]:
    """Return the parts of keys and values as they are stored."""
    stored = _stored_dtype(batch)
    if stored.itemsize > 1:
        return parts
    most = torch.finfo(stored).max
    pair = [
        numbers / (scale.view(-1, 1) if isinstance(scale, Tensor) else scale)
        for numbers, scale in zip((parts[0][0], parts[-1][-1]), scales, strict=True)
    ]
    parts = (
        [torch.stack(pair)] if len(parts) == 1 else [numbers[None] for numbers in pair]
    )
    return [part.clamp_(-most, most).to(stored) for part in parts]


def _store_query(batch: SignedBatch, query: Tensor) -> Tensor:
    """Return the queries with padding rows, in a tensor of their own."""
    tokens, heads, size = query.shape
    wide = own = heads * size
    if batch.signature.choice["query"] == "fused":
        wide += 2 * batch.signature.kv_heads * size
    rows = query.new_empty(tokens + batch.padding, wide)
    if wide > own:
        rows[:, own:].fill_(NAN)
    stored = heads_of(rows[:, :own], heads)
    if not batch.padding:
        return stored.copy_(query)
    # for odd seeds finite padding rows, as an earlier step leaves them
    rows[tokens:].fill_(0.5 if batch.seed % 2 else NAN)
    stored[:tokens].copy_(query)
    return stored


def empty_pair(
    batch: SignedBatch, num_blocks: int, block_size: int, pair: Sequence[Tensor]
) -> list[Tensor]:
    """Return caches for keys and values, full of poison."""
    caches = _empty_caches(batch, num_blocks, block_size, pair)
    return [caches[0][0], caches[-1][-1]]


def _empty_caches(
    batch: SignedBatch, num_blocks: int, block_size: int, pair: Sequence[Tensor]
) -> list[Tensor]:
    """Return caches full of poison. e4m3 has no infinity.

    Args:
        batch: The batch.
        num_blocks, block_size: Sizes of the caches.
        pair: Keys and values, [rows, kv_heads, size].

    Returns:
        One tensor [2, num_blocks, block_size, kv_heads, size]. If the sizes of keys and values
        differ, two tensors [1, num_blocks, block_size, kv_heads, size].
    """
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
    if keys.shape[2] == values.shape[2]:
        return [first]
    return [first[:1], empty(values.shape[2])[1:]]


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch, on the host.

    Args:
        num_blocks: Blocks of the cache.
        rows: The block ids of each request.
        arguments: The arguments of the call that describe them.
        host: `slots`: [2, all keys] block and offset of each key. `kept`: [all keys] the key whose
            slot stores it, if blocks are stored more than once.
    """

    num_blocks: int
    rows: list[list[int]]
    arguments: dict[str, Any]
    host: dict[str, Tensor]


def _draw_blocks(batch: SignedBatch, generator: np.random.Generator) -> Blocks:
    """Return the blocks of a batch over a paged cache."""
    signature, size = batch.signature, batch.signature.block_size
    key_lens = np.array(batch.key_lens)
    counts = -(-key_lens // size)
    max_blocks = max(1, -(-signature.max_key_len // size), int(counts.max()))
    table, num_blocks = draw_table(batch, counts, max_blocks, generator)
    request, position = rows_of(key_lens)
    block, offset = table[request, position // size].astype(np.int64), position % size
    host = {"slots": torch.from_numpy(np.stack([block, offset]))}
    if batch.table != "scattered":
        # blocks that are stored twice keep the content that was stored last
        slots = block * size + offset
        last = np.zeros(num_blocks * size, dtype=np.int64)
        last[slots] = np.arange(len(slots))
        host["kept"] = torch.from_numpy(last[slots])
    arguments = {
        "block_table": torch.from_numpy(table),
        "seq_lens": torch.from_numpy(key_lens.astype(np.int32)),
        "max_seq_len": max(signature.max_key_len, *batch.key_lens),
    }
    rows = [row[:count].tolist() for row, count in zip(table, counts, strict=True)]
    return Blocks(num_blocks, rows, arguments, host)


def _store_keys(
    batch: SignedBatch,
    parts: Sequence[Tensor],
    blocks: Blocks | None,
    there: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the arguments that hold keys and values: in blocks, or one after another."""
    pair = parts[0][0], parts[-1][-1]
    if blocks is not None:
        caches = _empty_caches(
            batch, blocks.num_blocks, batch.signature.block_size, pair
        )
        block, offset = there["slots"].unbind()
        for cached, numbers in zip(caches, parts, strict=True):
            bits(cached)[:, block, offset] = bits(numbers)
        return {"key_cache": caches[0][0], "value_cache": caches[-1][-1]}
    total = len(pair[0])
    ragged = _empty_caches(batch, 1, total + batch.padding, pair)
    for cached, numbers in zip(ragged, parts, strict=True):
        cached[:, 0, :total].copy_(numbers)
    return {"key": ragged[0][0, 0], "value": ragged[-1][-1, 0]}


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


def _starts(lens: tuple[int, ...]) -> Tensor:
    """Return [reqs + 1] the first row of each request, and the total."""
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32)
