"""Signatures of attention calls, and batches that share one.

A kernel is compiled for what is constant in it: dtypes, head sizes, block size, options, and powers
of two of some bounds. A signature holds these. All its batches are served by the same compiled
kernels, and differ in everything else: lengths, block tables, needles, poison, numbers. So a round
of fuzzing draws a few signatures and hundreds of batches for each, and compilation is paid once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...validation.option import Drawing
from ...validation.options import OPTIONS as OPTION_FILES
from .batches import (
    GARBAGE,
    NAN,
    TABLES,
    draw_rows,
    empty_cache,
    heads_of,
    to_strided,
)
from .option_pairs import PLAIN, Choice, allowed, draw_choice
from .options import DTYPES, Call, make_options, starts_of, stored_as

POISONS = ("nan", "inf", "large")
"""Contents of slots that are not allocated: NaN, infinity, the largest number of the dtype."""
ENTRIES = ("far outside", "first block", "of another request")
"""Contents of block-table entries past the end of a sequence."""
NEEDLE_SCORE = 24.0
"""Score of a needle: its weight is e**24 times that of a key with the score 0."""


@dataclass(frozen=True)
class Limits:
    """Sizes that signatures are drawn from.

    Args:
        head_sizes, groups, block_sizes: As in `option_pairs.OPTIONS`.
        kv_heads: Numbers of kv heads.
        reqs: Maximum number of requests per batch.
        max_query_len: Maximum number of new tokens of a request.
        max_key_len: Maximum number of keys of a request.
        plain: Probability that an option is off.
    """

    head_sizes: tuple[str, ...]
    groups: tuple[str, ...]
    block_sizes: tuple[str, ...]
    kv_heads: tuple[int, ...]
    reqs: int
    max_query_len: int
    max_key_len: int
    plain: float


SMALL = Limits(
    head_sizes=("16", "16", "8", "24", "1", "80"),
    groups=("1", "2", "2", "3", "4", "8"),
    block_sizes=("16", "16", "8", "1", "3", "24"),
    kv_heads=(1, 1, 1, 2),
    reqs=3,
    max_query_len=20,
    max_key_len=80,
    plain=0.75,
)
"""For a CPU: the kernels' tiles are small there, so short sequences cross their edges."""
LARGE = Limits(
    head_sizes=("128", "128", "64", "64", "96", "256", "80", "24"),
    groups=("1", "2", "4", "4", "5", "8"),
    block_sizes=("16", "16", "32", "64", "128", "1", "24"),
    kv_heads=(1, 2, 2, 4),
    reqs=8,
    max_query_len=150,
    max_key_len=1100,
    plain=0.75,
)
"""For a GPU: sequences of many tiles, long enough to be split."""


@dataclass(frozen=True)
class Signature:
    """What all batches of a signature have in common.

    Args:
        choice: One value for each option, as in `option_pairs.OPTIONS`.
        kv_heads: Number of kv heads.
        reqs: Maximum number of requests per batch.
        max_query_len, max_key_len: Bounds of the lengths. The calls pass them as they are.
        seed: Selects what else is the same in all batches, such as the kind of an FP8 scale.
    """

    choice: Choice
    kv_heads: int = 1
    reqs: int = 3
    max_query_len: int = 20
    max_key_len: int = 80
    seed: int = 0

    @property
    def block_size(self) -> int:
        """Slots per block."""
        return int(self.choice["block_size"])

    @property
    def is_paged(self) -> bool:
        """Whether the keys are in a paged cache."""
        return self.choice["operation"] == "paged_attention"


@dataclass(frozen=True)
class SignedBatch:
    """One batch of a signature in small numbers.

    Args:
        signature: What it shares with the other batches.
        query_lens, key_lens: New tokens and keys of each request.
        needles: For each request, the position of the key that outweighs all others; -1 for none.
        table: One of TABLES: which blocks the requests share.
        poison: One of POISONS: the content of slots that are not allocated.
        entries: One of ENTRIES: the content of table entries past the end of a sequence.
        padding: Query rows after the last request.
        seed: Seed of the numbers, the blocks and the tensors of options.
    """

    signature: Signature
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    needles: tuple[int, ...]
    table: str = "scattered"
    poison: str = "nan"
    entries: str = "far outside"
    padding: int = 0
    seed: int = 0

    def simpler(self) -> Iterator["SignedBatch"]:
        """Yield batches that are simpler by one change, the largest simplification first."""
        reqs = list(zip(self.query_lens, self.key_lens, self.needles, strict=True))
        for req in range(len(reqs)):
            if len(reqs) > 1:
                yield self._with(reqs[:req] + reqs[req + 1 :])
        signature = self.signature
        for name, plain in PLAIN.items():
            if name == "operation" or signature.choice[name] == plain:
                continue
            rest = {other: v for other, v in signature.choice.items() if other != name}
            if plain in allowed(rest, name):
                choice = signature.choice | {name: plain}
                yield replace(self, signature=replace(signature, choice=choice))
        simpler_signatures: tuple[dict[str, Any], ...] = (
            {"kv_heads": 1},
            {"seed": 0},
            {"max_query_len": max(1, *self.query_lens)},
            {"max_key_len": max(1, *self.key_lens)},
        )
        for changes in simpler_signatures:
            yield replace(self, signature=replace(signature, **changes))
        simpler_contents: tuple[dict[str, Any], ...] = (
            {"table": "scattered"},
            {"poison": "nan"},
            {"entries": "far outside"},
            {"padding": 0},
            {"seed": 0},
            {"seed": 1},
        )
        for changes in simpler_contents:
            yield replace(self, **changes)
        crosses = signature.choice["causal"] == "cross"
        for req, (new, keys, needle) in enumerate(reqs):
            for shorter in (
                (new, keys, -1),
                (min(new, 1), keys, needle),
                (new, keys // 2, needle),
                (new, keys - signature.block_size, needle),
                (new, keys - 1, needle),
                (new - 1, keys, needle),
            ):
                if shorter[0] < 0 or shorter[1] < (0 if crosses else shorter[0]):
                    continue
                yield self._with([*reqs[:req], shorter, *reqs[req + 1 :]])

    def _with(self, reqs: list[tuple[int, int, int]]) -> "SignedBatch":
        return replace(
            self,
            query_lens=tuple(new for new, _, _ in reqs),
            key_lens=tuple(keys for _, keys, _ in reqs),
            needles=tuple(min(needle, keys - 1) for _, keys, needle in reqs),
        )


def draw_signature(
    seed: int, limits: Limits, operation: str = "paged_attention"
) -> Signature:
    """Return a random signature. Equal arguments give equal signatures."""
    pick = Random(f"signature {seed} {operation}")
    start = {"operation": operation}
    for name, plain in PLAIN.items():
        # sizes, layouts and dtypes are always drawn
        if name in OPTIONAL and pick.random() < limits.plain:
            start[name] = plain
    if operation == "encoder_attention":
        start["causal"] = pick.choice(["no", "no", "yes"])
    choice = draw_choice(pick, start.items())
    choice["head_size"] = pick.choice(limits.head_sizes)
    choice["group"] = pick.choice(limits.groups)
    if operation == "paged_attention":
        choice["block_size"] = pick.choice(limits.block_sizes)
    longest = {"decode": 1, "verification": 5, "prefill": limits.max_query_len}
    max_query_len = longest.get(choice["batch"], limits.max_query_len)
    return Signature(
        choice=choice,
        kv_heads=pick.choice(limits.kv_heads),
        reqs=limits.reqs,
        max_query_len=min(max_query_len, limits.max_query_len),
        max_key_len=limits.max_key_len,
        seed=pick.randrange(2**16),
    )


OPTIONAL = (
    *OPTION_FILES,
    "cache",
    "scales",
    "value_head_size",
    "scale",
)
"""Options that are off in most signatures."""


def draw_batch(signature: Signature, index: int) -> SignedBatch:
    """Return one of a signature's batches. Equal arguments give equal batches."""
    pick = Random(f"batch {signature.seed} {index}")
    reqs = pick.randint(1, signature.reqs)
    lens = [_draw_lengths(pick, signature) for _ in range(reqs)]
    return SignedBatch(
        signature=signature,
        query_lens=tuple(new for new, _ in lens),
        key_lens=tuple(keys for _, keys in lens),
        needles=tuple(_draw_needle(pick, signature, *each) for each in lens),
        table=pick.choice(TABLES),
        poison=pick.choice(["nan", *POISONS]),
        entries=pick.choice(["far outside", *ENTRIES]),
        padding=pick.choice([0, 0, 1, 3]),
        seed=pick.randrange(2**31),
    )


def _edges(signature: Signature) -> list[int]:
    """Return lengths at block, tile, window and chunk edges."""
    size = signature.block_size
    sizes = [size, 2 * size, 3 * size, 16, 32, 64, 128, 256, 512, 1024]
    for name in ("sliding_window", "attention_chunk_size"):
        if signature.choice[name] != "none":
            sizes += [int(signature.choice[name]), 2 * int(signature.choice[name])]
    return sizes


def _draw_lengths(pick: Random, signature: Signature) -> tuple[int, int]:
    """Return new tokens and keys of a request, on both sides of block and tile edges."""
    most, longest = signature.max_query_len, signature.max_key_len
    edges = [edge for edge in _edges(signature) if edge <= longest]
    keys = pick.choice(
        [
            pick.choice(edges) + pick.choice([-1, 0, 1]),
            pick.randint(1, longest),
            pick.randint(1, min(longest, 3 * signature.block_size)),
        ]
    )
    keys = min(max(keys, 0), longest)
    kind = signature.choice["batch"]
    if kind == "mixed":
        kind = pick.choice(["decode", "prefill", "chunk", "verification"])
    new = {
        "decode": 1,
        "prefill": min(keys, most),
        "chunk": pick.randint(1, most),
        "verification": pick.randint(1, min(5, most)),
    }[kind]
    if kind == "prefill":
        keys = new if pick.random() < 0.7 else keys
    if pick.random() < 0.06:
        new = 0
    if signature.choice["causal"] == "cross":
        return new, keys
    return min(new, keys), keys


def _draw_needle(pick: Random, signature: Signature, new: int, keys: int) -> int:
    """Return the position of a needle next to an edge, or -1."""
    if not keys or pick.random() < 0.4:
        return -1
    size, last = signature.block_size, keys - 1
    edges = [0, last, keys - new, last // size * size, last // 32 * 32, last // 64 * 64]
    edges += [last - each for each in _edges(signature)[-3:]]
    edges.append(pick.randrange(keys))
    return min(max(0, pick.choice(edges) - pick.choice([0, 0, 1])), last)


@st.composite
def signed_batches(draw: st.DrawFn, operation: str = "paged_attention") -> SignedBatch:
    """Return a batch of one of four signatures, so that few kernels are compiled."""
    seed = draw(st.integers(0, 2**20))
    return draw_batch(draw_signature(seed % 4, SMALL, operation), seed)


@dataclass(frozen=True)
class SignedCall:
    """The call of a batch.

    Args:
        call: The call, on the device of the candidate.
        host: The same call on the host.
        keys, values: [all keys, kv_heads, size] what the cache stores for each request, request
            after request, on the host.
    """

    call: Call
    host: Call
    keys: Tensor
    values: Tensor


def build_signed(batch: SignedBatch, device: torch.device) -> SignedCall:
    """Return the tensors of a batch.

    Everything that must not be read is poisoned, as in `batches.build`.
    """
    signature, choice = batch.signature, batch.signature.choice
    generator = torch.Generator().manual_seed(batch.seed)
    group, size = int(choice["group"]), int(choice["head_size"])
    kv_heads, heads = signature.kv_heads, signature.kv_heads * group
    value_size = size if choice["value_head_size"] == "as the keys" else size + 5
    dtype = DTYPES[choice["dtype"]]
    stored = dtype if choice["cache"] == "as the query" else DTYPES[choice["cache"]]
    scale = None if choice["scale"] == "none" else float(choice["scale"])
    arguments: dict[str, Any] = {} if scale is None else {"scale": scale}
    scales = _scales(choice["scales"], kv_heads)
    if scales is not None:
        arguments |= {"k_scale": scales[0], "v_scale": scales[1]}

    # step: draw queries, keys and values, with needles among the keys
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tokens, total = sum(batch.query_lens), sum(batch.key_lens)
    queries, lean = random(tokens, heads, size), random(kv_heads, size)
    keys, values = random(total, kv_heads, size), random(total, kv_heads, value_size)
    lean = torch.nn.functional.normalize(lean, dim=1)
    factor = size**-0.5 if scale is None else scale
    starts = [0, *accumulate(batch.query_lens)]
    key_starts = [0, *accumulate(batch.key_lens)]
    for req, needle in enumerate(batch.needles):
        if needle < 0:
            continue
        own = slice(starts[req], starts[req + 1])
        queries[own] = 0.25 * queries[own] + 2 * lean.repeat_interleave(group, 0)
        keys[key_starts[req] + needle] = NEEDLE_SCORE / 2 / factor * lean
        values[key_starts[req] + needle] += 3
    pair = [
        stored_as(each, its, stored)
        for each, its in zip((keys, values), scales or (1.0, 1.0), strict=True)
    ]

    # step: store them in the chosen layout
    width = heads * size
    wide = width + (2 * kv_heads * size if choice["query"] == "fused" else 0)
    rows_of_queries = torch.full((tokens + batch.padding, wide), NAN, dtype=dtype)
    if batch.seed % 2:
        # finite padding rows, as an earlier step leaves them
        rows_of_queries[tokens:] = 0.5
    query = heads_of(rows_of_queries[:, :width], heads)
    query[:tokens] = queries.to(dtype)
    arguments |= {
        "query": query,
        "query_start_loc": starts_of(batch.query_lens, torch.device("cpu")),
        "max_query_len": max(signature.max_query_len, *batch.query_lens),
    }
    rows: list[list[int]] = []
    if signature.is_paged:
        stored_keys, rows = _store_paged(batch, pair, stored, generator)
        arguments |= stored_keys
        pair = _gather(arguments, batch.key_lens, rows)
    else:
        arguments |= _store_ragged(batch, pair, stored)

    # step: make the options
    pick = Random(batch.seed)
    drawing = Drawing(
        pick, batch.query_lens, batch.key_lens, heads, batch.padding, query.device
    )
    arguments |= make_options(choice, drawing)
    given = {"given": dtype, "made": None}
    out_dtype = given.get(choice["out"], DTYPES.get(choice["out"]))
    if out_dtype not in (None, dtype):
        number = pick.choice([0.01, 0.05])
        kinds = (number, torch.tensor(number), torch.tensor([number]))
        arguments["out_scale"] = kinds[signature.seed % 3]
    host = Call(
        operation=choice["operation"],
        arguments=arguments,
        dtype=dtype,
        out_dtype=out_dtype,
        wants_lse=choice["lse"] == "given",
        query_lens=batch.query_lens,
        key_lens=batch.key_lens,
        rows=rows,
    )
    return SignedCall(_moved(host, device), host, pair[0], pair[1])


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


def _poison(batch: SignedBatch, dtype: torch.dtype) -> float:
    """Return the content of slots that are not allocated. e4m3 has no infinity."""
    if batch.poison == "nan":
        return NAN
    if batch.poison == "large" or dtype == torch.float8_e4m3fn:
        return torch.finfo(dtype).max
    return torch.inf


def _empty_pair(
    batch: SignedBatch,
    num_blocks: int,
    block_size: int,
    stored: torch.dtype,
    sizes: Any,
) -> list[Tensor]:
    """Return caches of keys and of values, full of poison."""
    pair = []
    for half, size in enumerate(sizes):
        layout, kv_heads = batch.signature.choice["layout"], batch.signature.kv_heads
        cache = empty_cache(layout, num_blocks, block_size, kv_heads, size, stored)
        if batch.poison != "nan":
            cache.fill_(_poison(batch, stored))
        pair.append(cache[half])
    return pair


def _store_paged(
    batch: SignedBatch,
    pair: list[Tensor],
    stored: torch.dtype,
    generator: torch.Generator,
) -> tuple[dict[str, Any], list[list[int]]]:
    """Return the arguments that hold the keys and values in blocks, and the blocks."""
    signature, block_size = batch.signature, batch.signature.block_size
    counts = [-(-length // block_size) for length in batch.key_lens]
    rows, num_blocks = draw_rows(counts, batch.table, generator)
    max_blocks = max(1, -(-signature.max_key_len // block_size), *counts)
    table = _table(batch.entries, rows, max_blocks)
    blocks, offsets = _places(batch.key_lens, rows, block_size)
    if batch.table != "scattered":
        # blocks that are stored twice keep the content that was stored last
        slots = (blocks * block_size + offsets).flip(0)
        _, index = torch.unique(slots, return_inverse=True)
        first = torch.full((int(index.max()) + 1 if len(index) else 0,), len(index))
        first.scatter_reduce_(0, index, torch.arange(len(index)), "amin")
        kept = len(index) - 1 - first
        blocks, offsets = blocks[kept], offsets[kept]
        pair = [each[kept] for each in pair]
    sizes = [each.shape[-1] for each in pair]
    caches = _empty_pair(batch, num_blocks, block_size, stored, sizes)
    for cache, numbers in zip(caches, pair, strict=True):
        _bits(cache)[blocks, offsets] = _bits(numbers)
    return {
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_table": table,
        "seq_lens": torch.tensor(batch.key_lens, dtype=torch.int32),
        "max_seq_len": max(signature.max_key_len, *batch.key_lens),
    }, rows


def _store_ragged(
    batch: SignedBatch, pair: list[Tensor], stored: torch.dtype
) -> dict[str, Any]:
    """Return the arguments that hold the keys and values one after another."""
    total = len(pair[0])
    sizes = [each.shape[-1] for each in pair]
    ragged = _empty_pair(batch, 1, total + batch.padding, stored, sizes)
    for tensor, numbers in zip(ragged, pair, strict=True):
        tensor[0, :total] = numbers
    return {
        "key": ragged[0][0],
        "value": ragged[1][0],
        "key_start_loc": starts_of(batch.key_lens, torch.device("cpu")),
        "max_key_len": max(batch.signature.max_key_len, *batch.key_lens),
    }


def _table(entries: str, rows: list[list[int]], max_blocks: int) -> Tensor:
    """Return a block table whose entries past the end of each row are garbage."""
    table = torch.tensor(GARBAGE, dtype=torch.int32).repeat(len(rows), max_blocks)
    table = table[:, :max_blocks].contiguous()
    if entries == "first block":
        table.fill_(0)
    if entries == "of another request":
        ids = [block for row in rows for block in row] or [0]
        table = torch.tensor(ids, dtype=torch.int32).repeat(len(rows), max_blocks)
        table = table[:, :max_blocks].contiguous()
    for req, row in enumerate(rows):
        table[req, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return table


def _places(
    key_lens: tuple[int, ...], rows: list[list[int]], block_size: int
) -> tuple[Tensor, Tensor]:
    """Return [all keys] block and offset of each key."""
    blocks, offsets = [], []
    for length, row in zip(key_lens, rows, strict=True):
        position = torch.arange(length)
        blocks.append(torch.tensor(row, dtype=torch.int64)[position // block_size])
        offsets.append(position % block_size)
    return torch.cat(blocks), torch.cat(offsets)


def _gather(
    arguments: dict[str, Any], key_lens: tuple[int, ...], rows: list[list[int]]
) -> list[Tensor]:
    """Return [all keys, kv_heads, size] what the caches store for each request."""
    caches = [arguments[name] for name in ("key_cache", "value_cache")]
    blocks, offsets = _places(key_lens, rows, caches[0].shape[1])
    return [_bits(each)[blocks, offsets].view(each.dtype) for each in caches]


def _bits(tensor: Tensor) -> Tensor:
    """Return FP8 numbers as bytes, because torch cannot index them."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _moved(call: Call, device: torch.device) -> Call:
    """Return a call on a device, with the same strides."""
    if device.type == "cpu":
        return call
    strided = ("query", "key_cache", "value_cache", "key", "value")
    moved = {
        name: to_strided(each, device) if name in strided else each.to(device)
        for name, each in call.arguments.items()
        if isinstance(each, Tensor)
    }
    return replace(call, arguments=call.arguments | moved)
