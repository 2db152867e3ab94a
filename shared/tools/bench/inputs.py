"""Inputs: the tensors of a workload, the same for every library.

They are drawn again in each round. Blocks are scattered over the cache. If a library needs a mask,
a plan or gathered keys, it prepares them from these tensors in advance.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from .coded_inputs import GLOBAL_SCALE, decode, empty_coded, encode
from .workloads import Workload

SPARE_BLOCKS = 4
"""Blocks that a write must not change."""


@dataclass(frozen=True)
class Inputs:
    """The tensors of one workload in one round.

    Args:
        workload: The batch.
        query: [tokens, query_heads, head_size].
        key, value: [tokens, kv_heads, head_size] new tokens that are not in the cache, of kinds
            "encoder" and "write".
        key_cache, value_cache: [num_blocks, block_size, kv_heads, head_size].
        block_table: [reqs, max_blocks] int32; entries past the end of a row are 0.
        query_start_loc: [reqs + 1] int32.
        seq_lens: [reqs] int32.
        slot_mapping: [tokens] int64, of kind "write".
        sinks: Optional. [query_heads] float32, representable in `dtype`. If None, there are none.
        alibi_slopes: Optional. [query_heads] float32. If None, there are none.
        k_scale, v_scale: Optional. [num_blocks, block_size, kv_heads] float32 of formats that
            measure them, or block scales. If None, an FP8 cache has the scale 1.
    """

    workload: Workload
    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def max_query_len(self) -> int:
        return max(self.workload.query_lens)

    @property
    def max_seq_len(self) -> int:
        return max(self.workload.kv_lens)

    def fresh(self) -> Tensor:
        """Return a new output that is poisoned with NaN."""
        shape = (*self.query.shape[:2], self.workload.value_size)
        return self.query.new_full(shape, torch.nan)

    def options(self) -> AttentionOptions:
        """Return the options of the workload, without scales and without batch invariance."""
        workload = self.workload
        return AttentionOptions(
            causal=workload.causal,
            sliding_window=workload.sliding_window,
            logits_soft_cap=workload.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
        )

    @property
    def scales(self) -> tuple[Tensor | float | None, Tensor | float | None]:
        """The scales of keys and of values, as operations take them."""
        if self.k_scale is not None:
            return self.k_scale, self.v_scale
        return (1.0, 1.0) if self.workload.is_quantised else (None, None)

    @property
    def global_scales(self) -> tuple[float | None, float | None]:
        """What the block scales of keys and of values are multiplied by."""
        form = self.workload.form
        has_one = form is not None and form.has_global_scale
        return (GLOBAL_SCALE, GLOBAL_SCALE) if has_one else (None, None)

    def numbers(self, blocks: Tensor | slice, dtype: torch.dtype) -> list[Tensor]:
        """Return the keys and the values of some blocks as numbers."""
        if self.k_scale is None or self.v_scale is None:
            # float32 holds the numbers of any such cache exactly, an FP8 cache at scale 1 too
            return [
                cache[blocks].to(dtype) for cache in (self.key_cache, self.value_cache)
            ]
        return [
            decode(cache[blocks], scale[blocks], dtype)
            for cache, scale in (
                (self.key_cache, self.k_scale), (self.value_cache, self.v_scale)
            )
        ]  # fmt: skip

    def poison_cache(self) -> None:
        """Fill the cache with NaN, before a write."""
        caches = (self.key_cache, self.value_cache, self.k_scale, self.v_scale)
        for cache in caches:
            if cache is not None:
                fill_with_nan(cache)

    @cached_property
    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as [reqs, heads, length, head_size] of requests of equal length.

        With a sliding window, only the visible keys of a decode are gathered.
        """
        reqs = len(self.workload.kv_lens)
        kv_len, window = self.max_seq_len, self.workload.sliding_window

        def batched(rows: Tensor) -> Tensor:
            batch = rows.view(reqs, -1, *rows.shape[1:])
            return batch.transpose(1, 2).contiguous()

        if self.workload.kind == "encoder":
            return batched(self.query), batched(self.key), batched(self.value)

        def gathered(cache: Tensor) -> Tensor:
            rows = cache[self.block_table.long()].flatten(1, 2)[:, :kv_len]
            rows = rows if window is None else rows[:, -window:]
            return rows.transpose(1, 2).contiguous()

        return (
            batched(self.query),
            gathered(self.key_cache),
            gathered(self.value_cache),
        )


def fill_with_nan(cache: Tensor) -> None:
    """Fill a cache with NaN, modified in place. In both FP8 dtypes 0x7F is NaN."""
    if cache.dtype.itemsize == 1:
        cache.view(torch.uint8).fill_(0x7F)
    else:
        cache.fill_(torch.nan)


def draw_inputs(workload: Workload, seed: int, device: torch.device | str) -> Inputs:
    """Return the tensors of a workload, all drawn from the seed."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype, kv_dtype = workload.dtype, workload.kv_dtype
    sizes = (workload.head_size, workload.value_size)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=dtype, device=device, generator=generator)

    def shuffled(count: int) -> Tensor:
        return torch.randperm(count, device=device, generator=generator)

    counts = [-(-kv // workload.block_size) for kv in workload.kv_lens]
    starts = torch.tensor([0, *workload.query_lens]).cumsum(0).int().to(device)
    query = normal(workload.tokens, workload.query_heads, workload.head_size)
    if workload.query_dtype is not None:
        query = query.to(workload.query_dtype).to(dtype)
    is_uncached = workload.kind in ("encoder", "write")
    new_tokens = workload.tokens if is_uncached else 0
    key, value = (normal(new_tokens, workload.kv_heads, size) for size in sizes)
    shared = workload.shared_prefix // workload.block_size
    num_blocks = sum(counts) - shared * (len(counts) - 1)
    num_blocks = 0 if workload.kind == "encoder" else num_blocks
    num_blocks += SPARE_BLOCKS if workload.kind == "write" else 0
    slots_and_heads = (num_blocks, workload.block_size, workload.kv_heads)
    key_cache = normal(*slots_and_heads, workload.head_size).to(kv_dtype)
    k_scale, v_scale = None, None
    if workload.form is not None:
        coded = empty_coded(
            workload.form, slots_and_heads, sizes, workload.in_page, device
        )
        encode(workload.form, key_cache, coded.key, coded.k_scale)
        value_cache = normal(*slots_and_heads, workload.value_size)
        encode(workload.form, value_cache, coded.value, coded.v_scale)
        key_cache, value_cache, k_scale, v_scale = coded
    elif workload.kind == "latent":
        value_cache = key_cache[..., : workload.value_size]
    else:
        value_cache = normal(*slots_and_heads, workload.value_size).to(kv_dtype)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    slots = torch.zeros(0, dtype=torch.int64, device=device)
    if workload.kind == "write":
        slots = shuffled(num_blocks * workload.block_size)[: workload.tokens]
    elif workload.kind != "encoder":
        blocks, begin = shuffled(num_blocks).int(), shared
        for row, count in zip(table, counts, strict=True):
            row[:shared] = blocks[:shared]
            row[shared:count] = blocks[begin : begin + count - shared]
            begin += count - shared
    sinks = normal(workload.query_heads).float() if workload.sinks else None
    slopes = alibi_slopes(workload.query_heads, device) if workload.alibi else None
    return Inputs(
        workload=workload,
        query=query,
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=table,
        query_start_loc=starts,
        seq_lens=torch.tensor(workload.kv_lens, dtype=torch.int32, device=device),
        slot_mapping=slots,
        sinks=sinks,
        alibi_slopes=slopes,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def alibi_slopes(query_heads: int, device: torch.device | str) -> Tensor:
    """Return [query_heads] float32 slopes that fall geometrically from head to head.

    Source: Press et al., "Train Short, Test Long", ICLR 2022.

    Example:
        8 heads: 1/2, 1/4, ..., 1/256.
    """
    heads = torch.arange(1, query_heads + 1, dtype=torch.float32, device=device)
    return torch.exp2(-8 * heads / query_heads)
