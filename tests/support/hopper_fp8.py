"""The FP8 kernels for Hopper in the Gluon interpreter: calls, faults, and what judges them.

A decode is the FP8 decode kernel alone. A prefill is the conversion of the cache, and then the
prefill kernel.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan, BatchTensors, to_strided
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.gluon_interpreter.kernels import InterpretedLaunches as Interpreted
from pagetwin.optimized.kernels.portable.host import launches
from pagetwin.optimized.kernels.portable.host import make_launches as prepare
from pagetwin.optimized.kernels.sm90.code_decode import family as code_decode
from pagetwin.optimized.kernels.sm90.code_decode.family import BLOCK_M
from pagetwin.optimized.kernels.sm90.code_prefill import family as code_prefill
from pagetwin.optimized.kernels.sm90.code_prefill import launcher
from pagetwin.optimized.runtime.family import EVERYTHING
from torch import Tensor

from support.compile_fp8_decode_sm90 import E4M3, E5M2
from support.fp8_calls import assert_right, make_batch, make_options, to_call
from support.hopper import COUNTERS, pretend_hopper
from support.thresholds import set_thresholds

BF16, FP16 = torch.bfloat16, torch.float16
NAN = float("nan")
MIN_SEGMENT = 128
"""Keys of a segment, at least: several tiles, so that it may go from one request to the next."""
REQS_PER_PASS = (2, 4)
"""Requests that are counted at once: those of a small batch, and those of a pass over many."""


@contextmanager
def pretend_fp8_hopper(
    patch: pytest.MonkeyPatch, seed: int = 0, **options: float
) -> Iterator[Interpreted]:
    """Select the FP8 kernels for Hopper on the CPU, and interpret them.

    Args:
        seed, options: those of `interpret_launcher`.
    """
    # Triton's interpreter needs offsets of 64 bits and an output in float32, this one does not
    patch.setattr(prepare, "INTERPRETED", False)
    patch.setattr(prepare, "must_widen", lambda dtype: False)
    patch.setattr(launcher, "has_native_fp8", lambda device: True)
    patch.setattr(launches, "REQS_PER_PASS", REQS_PER_PASS)
    set_thresholds(patch, min_segment=MIN_SEGMENT)
    with pretend_hopper(patch, seed, **options) as interpreted:
        yield interpreted


class Fp8Case(NamedTuple):
    """A call with an FP8 cache.

    Args:
        plan: the batch. Block 0 is the first one of its first request, and the last block of the
            cache is the last one of its last request.
        options: of the call, besides a scale per KV head, other ones for keys than for values.
        dtype: of the cache.
        value_size: Optional. Elements of a value head, fewer than of a key head. If None, as many.
        is_prefill: whether the prefill kernel computes the requests of more than BLOCK_M rows.
            If not, they are left as they are.
    """

    plan: BatchPlan
    options: dict[str, Any] = {}  # noqa: RUF012 (it is never changed)
    dtype: torch.dtype = E4M3
    value_size: int | None = None
    is_prefill: bool = False


def use_end_blocks(batch: BatchTensors) -> BatchTensors:
    """Return the batch with requests at both ends of the cache, past which memory ends."""
    table, rows = batch.block_table.clone(), [list(row) for row in batch.rows]
    caches = [batch.key_cache, batch.value_cache]
    used = [row for row in rows if row]
    last = caches[0].shape[0] - 1
    for row, entry, block in ((used[0], 0, 0), (used[-1], -1, last)):
        other = row[entry]
        for cache in caches:
            codes = cache.view(torch.uint8)
            pair = codes[[block, other]]
            codes[other], codes[block] = pair[0], pair[1]
        exchange = {block: other, other: block}
        for blocks in rows:
            blocks[:] = [exchange.get(number, number) for number in blocks]
    for req, row in enumerate(rows):
        table[req, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return replace(batch, block_table=table, rows=rows)


def make_call(case: Fp8Case) -> tuple[BatchTensors, AttentionOptions]:
    """Return the tensors of a case, and its options."""
    batch = use_end_blocks(make_batch(case.plan, case.dtype, "cpu"))
    if case.value_size is not None:
        # with other strides than the keys have
        values = batch.value_cache.view(torch.uint8)[..., : case.value_size]
        values = values.contiguous().view(case.dtype)
        batch = replace(batch, value_cache=values)
    return batch, make_options(batch, **case.options)


def forget_keys(batch: BatchTensors, options: AttentionOptions) -> BatchTensors:
    """Return the batch with NaN in all slots that no query attends to, and no ids of such blocks.

    The keys of all queries of a request count as one range.
    """
    table, plan = batch.block_table.clone(), batch.plan
    attended = torch.zeros(batch.key_cache.shape[:2], dtype=torch.bool)
    for req, (new, keys) in enumerate(zip(plan.query_lens, plan.kv_lens, strict=True)):
        first = 0 if new else keys + plan.block_size
        if options.sliding_window is not None:
            first = max(first, keys - new - options.sliding_window + 1)
        if options.attention_chunk_size is not None:
            size = options.attention_chunk_size
            first = max(first, (keys - new) // size * size)
        table[req, : first // plan.block_size] = 2**31 - 1
        for position in range(first, keys):
            block = batch.rows[req][position // plan.block_size]
            attended[block, position % plan.block_size] = True
    caches = [
        to_strided(cache, cache.device)
        for cache in (batch.key_cache, batch.value_cache)
    ]
    for cache in caches:
        cache.view(torch.uint8)[~attended] = 0x7F
    return replace(batch, block_table=table, key_cache=caches[0], value_cache=caches[1])


def spread(tensor: Tensor, axis: int, distance: int) -> Tensor:
    """Return a copy in which the first and the last entry of an axis are at least `distance` apart.

    They are not if the stride of the axis would need 64 bits. The elements between them are holes
    of a sparse file, which cost addresses and no memory.
    """
    strides, packed = [0] * tensor.dim(), 1
    for number in reversed(range(tensor.dim())):
        if number != axis:
            strides[number], packed = packed, packed * tensor.shape[number]
    # a multiple of the words of the FP8 decode kernel
    step = (distance // (tensor.shape[axis] - 1) // 16 + 1) * 16
    strides[axis] = min(step, 2**31 - 16)
    size = packed + strides[axis] * (tensor.shape[axis] - 1)
    with tempfile.NamedTemporaryFile() as file:
        kind = torch.uint8 if tensor.itemsize == 1 else tensor.dtype
        memory = torch.from_file(file.name, shared=True, size=size, dtype=kind)
    copy = memory.as_strided(tensor.shape, strides)
    return copy.copy_(tensor.view(kind)).view(tensor.dtype)


def launch(
    batch: BatchTensors,
    options: AttentionOptions,
    is_prefill: bool = False,
    has_lse: bool = True,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernels of a batch into an output and a log-sum-exp full of NaN.

    Args:
        is_prefill: as in `Fp8Case`.
        has_lse: whether the log-sum-exp is wanted.
        out_dtype: Optional. Of the output. If None, that of the queries.
    """
    out, lse = batch.fresh()
    out = out.to(out_dtype or out.dtype)
    call = to_call(batch, options, out, lse if has_lse else None)
    assert code_decode.supports(call)
    # whatever `takes` says of few short requests, which have a portable kernel
    code_decode.plan(call).launch(call, EVERYTHING)
    if is_prefill:
        assert code_prefill.supports(call)
        planned = code_prefill.plan(call)
        assert planned.takes(call)
        planned.launch_prefill(call, BLOCK_M)
    for counters in COUNTERS:
        assert not bool(counters.any()), "counters are not 0 after the launch"
    return out, lse


def check(case: Fp8Case, reference: Any) -> tuple[Tensor, Tensor]:
    """Launch a case, and compare each row with float64 within its error budget.

    Raises:
        AssertionError: a row is not within its budget, rows of long requests were written by the
            decode kernel, or padding was not cleared.
    """
    batch, options = make_call(case)
    out, lse = launch(forget_keys(batch, options), options, case.is_prefill)
    if not case.is_prefill:
        out, lse = _take_long_rows(batch, options, reference, out, lse)
    assert_right(batch, out, lse, reference, options)
    assert bool((out[batch.tokens :] == 0).all())
    return out, lse


def _take_long_rows(
    batch: BatchTensors,
    options: AttentionOptions,
    reference: Any,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the results with right rows of long requests, which must be as they were: NaN."""
    lens = batch.query_start_loc.diff()
    is_long = lens * batch.plan.group > BLOCK_M
    rows = is_long.repeat_interleave(lens).nonzero()[:, 0]
    assert bool(out[rows].isnan().all()) and bool(lse[:, rows].isnan().all())
    right, right_lse = batch.fresh()
    reference.paged_attention(
        **batch.arguments(), out=right, lse=right_lse, options=options
    )
    out[rows], lse[:, rows] = right[rows], right_lse[:, rows]
    return out, lse


def plan_of(
    query_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    head_size: int = 64,
    **given: Any,
) -> BatchPlan:
    """Return a batch of bfloat16 with two KV heads of 4 query heads each."""
    return BatchPlan(
        query_lens, kv_lens, head_size=head_size, **{"dtype": BF16, "group": 4, **given}
    )


# requests on both sides of the ends of pages, warps and KV tiles
EDGES = (1,) * 10, (1, 15, 16, 17, 33, 127, 128, 129, 255, 257)
RAGGED = (1, 4, 0, 2, 1), (50, 400, 40, 131, 300)
CASES = {
    f"blocks of {size}, needle {needle}": Fp8Case(
        plan_of((1, 2, 1), (261, 70, 129), 128, block_size=size, needle=needle)
    )
    for size, needle in (
        (16, "last"), (32, "tile edge"), (48, "block edge"), (64, "first"),
        (128, "block edge"), (256, "first new"),
    )
} | {
    f"a group of {group}, float16": Fp8Case(
        plan_of((1, 16 // group, 0, 1), (40, 300, 9, 129), group=group, dtype=FP16,
        kv_heads=1, needle="first new", padding=2)
    )
    for group in (1, 3, 8, 16)
} | {
    f"{name}, needle {needle}": Fp8Case(plan_of(*RAGGED, needle=needle), options)
    for name, options, needle in (
        ("not causal", {"causal": False}, "last"),
        ("a window of one key", {"sliding_window": 1}, "first new"),
        ("a window", {"sliding_window": 100}, "tile edge"),
        ("a window of a tile", {"sliding_window": 128}, "none"),
        ("a window to both sides", {"sliding_window": 50, "causal": False}, "first new"),
        ("chunks", {"attention_chunk_size": 100}, "first new"),
        ("a window in chunks", {"sliding_window": 40, "attention_chunk_size": 150}, "none"),
        ("a cap", {"logits_soft_cap": 3.0}, "last"),
        ("sinks", {"sinks": True}, "none"),
        ("several options", {"sliding_window": 90, "logits_soft_cap": 20.0, "sinks": True},
         "tile edge"),
    )
} | {
    "edges, head size 64": Fp8Case(plan_of(*EDGES, needle="last", padding=3)),
    "edges, head size 128": Fp8Case(plan_of(*EDGES, 128, kv_heads=1), dtype=E5M2),
    "values of 64": Fp8Case(plan_of((1, 2), (300, 70), 128), value_size=64),
    "e5m2": Fp8Case(plan_of((1, 2), (300, 70), needle="last"), dtype=E5M2),
    "heads before slots": Fp8Case(
        plan_of((1, 2), (300, 70), layout="hnd", needle="last")
    ),
    "interleaved": Fp8Case(plan_of((1, 2), (300, 70), 128, layout="interleaved")),
    "shared blocks": Fp8Case(plan_of((1, 1), (133, 300), table="shared prefix")),
    "scales that are numbers": Fp8Case(
        plan_of((1, 2), (300, 70)), {"k_scale": 0.7, "v_scale": 2.5}
    ),
    "one scale for all heads": Fp8Case(
        plan_of((1, 2), (300, 70)),
        {"k_scale": torch.tensor([0.7]), "v_scale": torch.tensor([2.5])},
    ),
    "a number and a scale per head": Fp8Case(plan_of((1, 2), (300, 70)), {"k_scale": 0.7}),
    "a request in many segments": Fp8Case(
        plan_of((1,), (1290,), 128, group=16, kv_heads=1, needle="tile edge")
    ),
    "two requests in many segments": Fp8Case(plan_of((1, 1), (901, 800), kv_heads=2)),
    "many tiles in a segment": Fp8Case(plan_of((1,), (1700,), block_size=32)),
    "drafts in many segments, sinks": Fp8Case(
        plan_of((4, 1), (901, 5), needle="first"), {"sinks": True}
    ),
    "large sinks": Fp8Case(plan_of((1,), (40,), kv_heads=1), {"sinks": 150.0}),
    "large sinks in many segments": Fp8Case(
        plan_of((1,), (901,), kv_heads=1), {"sinks": 150.0}
    ),
    "two requests": Fp8Case(plan_of((1, 3), (40, 500), needle="last")),
    "four requests": Fp8Case(plan_of((1, 3, 0, 1), (40, 500, 3, 260), padding=9)),
    "bounds above the maxima": Fp8Case(plan_of((1, 2), (333, 70), spare_max=2, scale=0.1)),
    "long requests are left as they are": Fp8Case(
        plan_of((1, 5, 1, 2, 30), (20, 140, 30, 333, 30), padding=2)
    ),
    "prefill": Fp8Case(
        plan_of((1, 70, 4), (300, 336, 40), needle="last", padding=2), is_prefill=True
    ),
    "prefill, one KV head": Fp8Case(
        plan_of((17,), (20,), group=1, kv_heads=1), is_prefill=True
    ),
    "prefill, three KV heads": Fp8Case(
        plan_of((1, 1, 17), (5, 9, 70), group=1, kv_heads=3), is_prefill=True
    ),
    "prefill, head size 128, float16, e5m2": Fp8Case(
        plan_of((5, 66), (200, 131), 128, dtype=FP16, needle="tile edge"),
        dtype=E5M2, is_prefill=True,
    ),
    "prefill, blocks of 48, window": Fp8Case(
        plan_of((1, 30), (300, 333), block_size=48, needle="block edge"),
        {"sliding_window": 100, "k_scale": 0.7}, is_prefill=True,
    ),
    "prefill, window to both sides": Fp8Case(
        plan_of((90, 40), (200, 333), needle="tile edge"),
        {"causal": False, "sliding_window": 50}, is_prefill=True,
    ),
    "prefill, chunks, sinks": Fp8Case(
        plan_of((40, 1, 6), (290, 70, 9), 128), {"attention_chunk_size": 100, "sinks": True},
        is_prefill=True,
    ),
}  # fmt: skip
