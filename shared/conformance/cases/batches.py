"""Paged batches for attention: plans, the tensors built from them, and strategies that draw them.

A plan consists of a few small numbers, so that a failing example can be read; `build` turns it into
tensors. Everything that must not be read is poisoned: NaN in every slot that is not allocated and,
for even seeds, in padding rows; ids far outside the cache past the end of each row of the block
table. Lengths are on both sides of block and tile edges. Blocks are scattered, shared between rows
and repeated within one row. Caches are views with various strides. One key, the needle, outweighs
all others: if a kernel drops it, or does not mask it for an earlier query, the error has the size
of a value, not of a rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from .reuse import compiled

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LAYOUTS = (
    "separate",
    "interleaved",
    "hnd",
    "interleaved hnd",
    "padded",
    "every other element",
)
TABLES = ("scattered", "shared prefix", "repeated block")
NEEDLES = ("none", "first", "last", "first new", "block edge", "tile edge")
GARBAGE = (2**31 - 1, -1, -(2**31), 10**6)
NAN = float("nan")


@dataclass(frozen=True)
class BatchPlan:
    """A batch in small numbers.

    Args:
        query_lens, kv_lens: New tokens and keys of each request.
        spare_blocks: Columns of the block table past the end of the longest row, all garbage.
        padding: Query rows after the last request.
        layout, value_layout: Layouts of the key cache and the value cache. If `value_layout` is
            None, both have the same layout.
        needle: Position of the key that outweighs all others of its sequence, one of NEEDLES.
        scale: Optional. Scale of the scores. If None, 1 / sqrt(head_size).
        spare_max: Tokens by which max_query_len and max_seq_len exceed the actual maxima.
    """

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_size: int = 16
    kv_heads: int = 2
    group: int = 2
    head_size: int = 16
    dtype: torch.dtype = torch.float32
    layout: str = "separate"
    value_layout: str | None = None
    table: str = "scattered"
    needle: str = "none"
    spare_blocks: int = 1
    padding: int = 0
    scale: float | None = None
    spare_max: int = 0
    fused: bool = True
    seed: int = 0


@dataclass(frozen=True)
class BatchTensors:
    """The tensors of a plan, and its lengths and block ids on the host."""

    plan: BatchPlan
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    max_query_len: int
    max_seq_len: int
    rows: list[list[int]] = field(repr=False)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `paged_attention` by name."""
        return {
            "query": self.query,
            "key_cache": self.key_cache,
            "value_cache": self.value_cache,
            "block_table": self.block_table,
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "max_query_len": self.max_query_len,
            "max_seq_len": self.max_seq_len,
            "scale": self.plan.scale,
        }

    def fresh(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return an output and a log-sum-exp full of NaN."""
        tokens, heads, _ = self.query.shape
        out = self.query.new_full(
            (tokens, heads, self.value_cache.shape[-1]),
            NAN,
            dtype=dtype or self.plan.dtype,
        )
        lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        return out, torch.full((heads, tokens), NAN, dtype=lse_dtype, device=out.device)

    def to(self, device: torch.device) -> "BatchTensors":
        """Return the batch on another device, with the same strides."""
        moved: dict[str, Any] = {
            name: put_on(value, device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    @property
    def tokens(self) -> int:
        """New tokens, padding not counted."""
        return sum(self.plan.query_lens)


def put_on(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, with the same strides; itself if it is there."""
    return tensor if tensor.device.type == device.type else to_strided(tensor, device)


def to_strided(tensor: Tensor, device: torch.device) -> Tensor:
    # .to() packs views; this keeps the strides, with poison between the elements
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((max(size, 1) - 1) * stride for size, stride in spans)
    offset = tensor.storage_offset()
    dtype = tensor.dtype
    is_float = dtype.is_floating_point
    poison = NAN if is_float else dtype != torch.bool and torch.iinfo(dtype).max
    base = torch.full((offset + extent,), poison, dtype=dtype, device=device)
    moved = base.as_strided(tensor.shape, tensor.stride(), offset)
    return moved.copy_(tensor)


def heads_of(flat: Tensor, heads: int) -> Tensor:
    """Return [tokens, heads, elements] as a view of [tokens, heads * elements]."""
    shape = (flat.shape[0], heads, flat.shape[1] // heads)
    strides = (flat.stride(0), shape[2] * flat.stride(1), flat.stride(1))
    return flat.as_strided(shape, strides, flat.storage_offset())


def empty_cache(
    layout: str,
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    content: float = NAN,
) -> Tensor:
    """Return a cache [2, num_blocks, block_size, kv_heads, head_size] full of NaN or `content`."""

    def full(*shape: int) -> Tensor:
        return torch.full(shape, content, dtype=dtype, device=device)

    if layout == "separate":
        return full(2, num_blocks, block_size, kv_heads, head_size)
    if layout == "interleaved":
        return full(num_blocks, 2, block_size, kv_heads, head_size).transpose(0, 1)
    if layout == "hnd":
        return full(2, num_blocks, kv_heads, block_size, head_size).transpose(2, 3)
    if layout == "interleaved hnd":
        cache = full(num_blocks, 2, kv_heads, block_size, head_size)
        return cache.permute(1, 0, 3, 2, 4)
    if layout == "every other element":
        cache = full(2, num_blocks, block_size, kv_heads, 2 * head_size)
        return cache[..., ::2]
    if layout == "padded":
        cache = full(2, num_blocks, block_size, kv_heads, head_size + 3)
        return cache[..., :head_size]
    raise ValueError(f"layout = {layout!r}: expected one of {LAYOUTS}")


def draw_rows(
    counts: list[int], kind: str, generator: torch.Generator
) -> tuple[list[list[int]], int]:
    """Return rows of scattered block ids, and the number of blocks (3 per entry, plus 1)."""
    num_blocks = 3 * sum(counts) + 1
    free = torch.randperm(num_blocks, generator=generator).tolist()
    rows: list[list[int]] = []
    for count in counts:
        rows.append([free.pop() for _ in range(count)])
    if kind == "shared prefix":
        for req in range(1, len(rows)):
            shared = min(len(rows[req]), len(rows[0])) // 2
            rows[req][:shared] = rows[0][:shared]
    if kind == "repeated block":
        for row in rows:
            if len(row) > 1:
                row[-1] = row[0]
    return rows, num_blocks


def table_of_rows(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    """Return [reqs, width] the block ids of each row, with garbage past its end."""
    table = torch.tensor(GARBAGE, dtype=torch.int32).repeat(len(rows), width)
    table = table[:, :width].contiguous()
    lens = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    ids = [block_id for row in rows for block_id in row]
    table[torch.arange(width) < lens[:, None]] = torch.tensor(ids, dtype=torch.int32)
    return table


def needle_position(
    needle: str, query_len: int, kv_len: int, block_size: int
) -> int | None:
    """Return the position of the needle in a sequence, or None if it has none."""
    if needle == "none" or kv_len == 0:
        return None
    positions = {
        "first": 0,
        "last": kv_len - 1,
        "first new": kv_len - query_len,
        "block edge": (kv_len - 1) // block_size * block_size,
        "tile edge": (kv_len - 1) // 64 * 64,
    }
    return min(positions[needle], kv_len - 1)


def build(plan: BatchPlan, device: torch.device | str = "cpu") -> BatchTensors:
    """Return the tensors of a plan."""
    generator = torch.Generator().manual_seed(plan.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    block_size, head_size = plan.block_size, plan.head_size
    counts = [-(-kv_len // block_size) for kv_len in plan.kv_lens]
    rows, num_blocks = draw_rows(counts, plan.table, generator)
    max_blocks = max(counts, default=0) + plan.spare_blocks
    block_table = torch.tensor(GARBAGE, dtype=torch.int32).repeat(
        len(rows), max_blocks
    )[:, :max_blocks]
    for req, row in enumerate(rows):
        block_table[req, : len(row)] = torch.tensor(row, dtype=torch.int32)

    sizes = (num_blocks, block_size, plan.kv_heads, head_size)
    key_cache, _ = empty_cache(plan.layout, *sizes, plan.dtype)
    _, value_cache = empty_cache(plan.value_layout or plan.layout, *sizes, plan.dtype)
    query_heads = plan.kv_heads * plan.group
    tokens = sum(plan.query_lens)
    width = query_heads * head_size
    spare = 2 * plan.kv_heads * head_size if plan.fused else 0
    fused = torch.full((tokens + plan.padding, width + spare), NAN, dtype=plan.dtype)
    if plan.seed % 2:
        # finite padding rows, as an earlier step leaves them: NaN would hide that they attend
        fused[tokens:] = 0.5
    query = heads_of(fused[:, :width], query_heads)

    scale = head_size**-0.5 if plan.scale is None else plan.scale
    direction = torch.nn.functional.normalize(random(plan.kv_heads, head_size), dim=1)
    values = random(tokens, query_heads, head_size)
    needles = []
    for kv_len, row in zip(plan.kv_lens, rows, strict=True):
        for position in range(kv_len):
            block_id, offset = row[position // block_size], position % block_size
            for cache in (key_cache, value_cache):
                cache[block_id, offset] = random(plan.kv_heads, head_size).to(
                    plan.dtype
                )
    start = 0
    for query_len, kv_len, row in zip(plan.query_lens, plan.kv_lens, rows, strict=True):
        needle = needle_position(plan.needle, query_len, kv_len, block_size)
        if needle is not None:
            # components along `direction`: 2 in each query, 12 / scale in this key; score 24
            lean = direction.repeat_interleave(plan.group, dim=0)
            values[start : start + query_len] *= 0.25
            values[start : start + query_len] += 2 * lean
            needles.append((row[needle // block_size], needle % block_size))
        start += query_len
    for block_id, offset in needles:
        key_cache[block_id, offset] = (12 / scale * direction).to(plan.dtype)
        value_cache[block_id, offset] += 3
    query[:tokens] = values.to(plan.dtype)

    starts = [0]
    for query_len in plan.query_lens:
        starts.append(starts[-1] + query_len)
    batch = BatchTensors(
        plan=plan,
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(plan.kv_lens, dtype=torch.int32),
        max_query_len=max(plan.query_lens, default=0) + plan.spare_max,
        max_seq_len=min(
            max(plan.kv_lens, default=0) + plan.spare_max, max_blocks * block_size
        ),
        rows=rows,
    )
    return batch.to(torch.device(device))


def draw_lengths(pick: Random, block_size: int, reqs: int) -> list[tuple[int, int]]:
    """Return (new tokens, keys) of each request, on both sides of block and tile edges."""
    edges = [0, 1, block_size - 1, block_size, block_size + 1]
    edges += [2 * block_size, 2 * block_size + 1, 3 * block_size + 1, 63, 64, 65]
    longest = 70
    kv_edges = sorted({edge for edge in edges if edge <= longest})
    batch = []
    for _ in range(reqs):
        kv_len = pick.choice([pick.choice(kv_edges), pick.randint(1, longest)])
        if pick.random() < 0.15:  # long enough for split-KV
            kv_len += 64
        news = [new for new in (1, 1, 2, 5, 17, 20, block_size, kv_len) if new <= 24]
        news = [new for new in news if new <= kv_len]
        idle = not news or pick.random() < 0.1
        batch.append((0 if idle else pick.choice(news), kv_len))
    return batch


@st.composite
def plans(draw: st.DrawFn, max_reqs: int = 4, dtypes: Any = DTYPES) -> BatchPlan:
    """Return the plan of a batch for attention.

    All values are derived from one seed. If they are drawn one by one, Hypothesis repeats a few
    values of each, and half of the batches have no new tokens.
    """
    pick = Random(draw(st.integers(0, 2**20)))
    kernel = compiled(pick)
    reqs = 0 if pick.random() < 0.05 else pick.randint(1, max_reqs)
    block_size = kernel.choice([1, 3, 16, 16, 16, 24])
    batch = draw_lengths(pick, block_size, reqs)
    return BatchPlan(
        query_lens=tuple(query_len for query_len, _ in batch),
        kv_lens=tuple(kv_len for _, kv_len in batch),
        block_size=block_size,
        kv_heads=kernel.choice([1, 2, 2, 3]),
        group=kernel.choice([1, 2, 3, 5, 7, 8]),
        head_size=kernel.choice([1, 8, 16, 16, 24, 64]),
        dtype=kernel.choice(dtypes),
        layout=kernel.choice(LAYOUTS),
        value_layout=kernel.choice([None, *LAYOUTS]),
        table=pick.choice(TABLES),
        needle=pick.choice(["none", *NEEDLES]),
        spare_blocks=pick.choice([0, 1, 2]),
        padding=pick.choice([0, 0, 1, 3]),
        scale=pick.choice([None, None, 0.3, 1.0]),
        spare_max=pick.choice([0, 0, 1, 7]),
        fused=kernel.choice([True, False]),
        seed=pick.randrange(2**16),
    )


# rare in random draws: large heads, 544-token blocks, one head, block_size == kv_heads
CORNERS = {
    "head size 80": BatchPlan((1, 3), (33, 17), head_size=80, group=1, needle="last"),
    "head size 96, fp16": BatchPlan(
        (1, 20), (65, 20), head_size=96, dtype=torch.float16, needle="tile edge"
    ),
    "head size 128, bf16": BatchPlan(
        (2, 1), (18, 49), head_size=128, dtype=torch.bfloat16, needle="first"
    ),
    "blocks of 544": BatchPlan(
        (1, 2), (545, 544), block_size=544, kv_heads=1, needle="block edge"
    ),
    "blocks of 544, interleaved": BatchPlan(
        (3, 1), (1, 543)[::-1], block_size=544, kv_heads=1, layout="interleaved"
    ),
    "block_size == kv_heads": BatchPlan(
        (1, 5), (10, 7), block_size=3, kv_heads=3, layout="hnd", needle="first new"
    ),
    "one head of one element": BatchPlan(
        (1, 4), (9, 4), kv_heads=1, group=1, head_size=1
    ),
    "empty batch": BatchPlan((), (), padding=2),
    "empty batch without a column": BatchPlan((), (), spare_blocks=0),
    "no new tokens": BatchPlan((0, 0), (5, 0)),
    "a long row beside short ones": BatchPlan(
        (1, 1, 1), (1, 300, 2), kv_heads=1, needle="tile edge", dtype=torch.float16
    ),
    "a whole prompt": BatchPlan((70,), (70,), kv_heads=1, needle="first new"),
    "a chunk that ends in a block": BatchPlan((21, 1), (43, 43), needle="first new"),
}
