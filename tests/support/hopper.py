"""The kernels for Hopper in the Gluon interpreter: cases of each family, and what judges them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from pagetwin.conformance.cases.batches import BatchPlan, BatchTensors, build
from pagetwin.conformance.checks.dense import judge_attention, judge_lse
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.gluon_interpreter.kernels import CHANGED, InterpretedLaunches
from pagetwin.optimized.dispatch import cascade, dispatch
from pagetwin.optimized.kernels.sm90.append import family as append
from pagetwin.optimized.kernels.sm90.append import segments
from pagetwin.optimized.kernels.sm90.cascade.family import PrefixPlan
from pagetwin.optimized.kernels.sm90.invariant import family as invariant
from pagetwin.optimized.kernels.sm90.latent import family as latent
from pagetwin.optimized.kernels.sm90.latent import items, schedule
from pagetwin.optimized.kernels.sm90.prefill import family as prefill
from pagetwin.optimized.runtime import workspace
from pagetwin.optimized.runtime.attention_call import AttentionCall
from torch import Tensor
from triton.experimental.gluon import language as gl

from support.interpreted_launcher import interpret_launcher
from support.planted_keys import share_prefix
from support.twins import TWINS

FOLDERS = (
    "prefill", "append", "cascade", "code_decode", "code_prefill", "invariant", "latent",
)  # fmt: skip
FAMILIES = {
    "prefill": prefill,
    "append": append,
    "invariant": invariant,
    "latent": latent,
}
NAN = float("nan")
COUNTERS: list[Tensor] = []
"""Counters that the launches of this context were given."""
BF16, FP16 = torch.bfloat16, torch.float16
PREFIX_LEN = 272
"""Keys of the shared prefix of a cascade."""
SCALES = torch.tensor([0.5, 0.25]), torch.tensor([2.0, 4.0])
"""Factors of the keys and values of two KV heads, with which bfloat16 stays exact."""
SPLIT_KEYS = 256
"""Keys per split of batch-invariant rows, and of a prefix: a few KV tiles."""


@contextmanager
def pretend_hopper(
    patch: pytest.MonkeyPatch, seed: int = 0, **options: float
) -> Iterator[InterpretedLaunches]:
    """Select the kernels for Hopper on the CPU, and interpret them.

    Args:
        seed, options: those of `interpret_launcher`.
    """
    for name in FOLDERS:
        module = import_module(f"pagetwin.optimized.kernels.sm90.{name}.family")
        patch.setattr(module, "is_hopper", lambda device: True)
    # requests are counted in several passes
    for module in (segments, schedule, items, *CHANGED.values()):
        for name in ("REQS_PER_PASS", "REQS_PER_SHORT_PASS"):
            if hasattr(module, name):
                patch.setattr(module, name, gl.constexpr(2))
    patch.setattr(invariant, "SPLIT_KEYS", SPLIT_KEYS)
    patch.setattr(PrefixPlan, "split_len", lambda *_: SPLIT_KEYS)
    allocate = workspace._allocate

    def allocate_and_note(*args: Any) -> tuple[Tensor, Tensor]:
        counters, numbers = allocate(*args)
        COUNTERS.append(counters)
        # a partial result that was not stored is NaN
        return counters, numbers.fill_(NAN)

    patch.setattr(workspace, "_allocate", allocate_and_note)
    COUNTERS.clear()
    # launches run one after another
    patch.setattr(triton.language.extra.cuda, "gdc_wait", lambda: None)
    _forget_plans()
    with interpret_launcher(seed, **options) as launches:
        yield launches
    _forget_plans()


def _forget_plans() -> None:
    """Forget launch plans and workspaces, which depend on the device."""
    dispatch.PIPELINE.plans.clear()
    cascade.PIPELINE.plans.clear()
    workspace.release_workspace()


class Case(NamedTuple):
    """A call of one family.

    Args:
        family: one of FAMILIES, or "cascade", whose requests share PREFIX_LEN keys.
        plan: the batch. A latent batch has queries and keys of 576 and values of 512.
        options: of the call; `sinks` is the largest of the heads, or True for a usual one.
        has_lse: whether the log-sum-exp is wanted.
        has_scales: whether keys and values have the SCALES; then there are two KV heads.
        seq_lens: Optional. Keys of each request, fewer than the batch has. If None, all of them.
        is_ragged: whether keys and values are given without a block table.
        processors: multiprocessors of the chip, for appends and latent decodes.
        key_size, value_size: Optional. Head size of queries and keys, and of values, if they are
            not that of the batch.
    """

    family: str
    plan: BatchPlan
    options: dict[str, Any] = {}  # noqa: RUF012 (it is never changed)
    has_lse: bool = True
    has_scales: bool = False
    seq_lens: tuple[int, ...] | None = None
    is_ragged: bool = False
    processors: int = 4
    key_size: int | None = None
    value_size: int | None = None


def make_batch(case: Case) -> BatchTensors:
    """Return the tensors of a case."""
    plan = case.plan
    if case.family == "latent":
        plan = replace(plan, kv_heads=1, head_size=576, fused=False, layout="separate")
    batch = build(plan)
    if case.family == "cascade":
        batch = share_prefix(batch, PREFIX_LEN)
    if case.seq_lens is not None:
        lens = torch.tensor(case.seq_lens, dtype=torch.int32)
        batch = replace(batch, seq_lens=lens, plan=replace(plan, kv_lens=case.seq_lens))
    if case.family == "latent":
        # no entry follows the blocks of the longest request
        entries = -(-max(plan.kv_lens) // plan.block_size)
        return replace(
            batch,
            value_cache=batch.key_cache[..., :512],
            block_table=batch.block_table[:, :entries],
        )
    keys, values = case.key_size, case.value_size
    return replace(
        batch,
        query=batch.query[..., :keys],
        key_cache=batch.key_cache[..., :keys],
        value_cache=batch.value_cache[..., :values],
    )


def make_options(case: Case, num_heads: int) -> AttentionOptions:
    """Return the options of a case, without batch invariance."""
    given = {"causal": True, **case.options}
    if "sinks" in given:
        largest = 4.0 if given["sinks"] is True else given["sinks"]
        given["sinks"] = torch.linspace(-3.0, largest, num_heads)
    return AttentionOptions(**given)


def gather_keys(batch: BatchTensors) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys and values of all requests in turn, and the index of each one's first."""
    lens = batch.plan.kv_lens
    key, value = (
        torch.cat(
            [
                cache[row].flatten(0, 1)[:kv_len]
                for row, kv_len in zip(batch.rows, lens, strict=True)
            ]
        )
        for cache in (batch.key_cache, batch.value_cache)
    )
    starts = [0, *accumulate(lens)]
    return key, value, torch.tensor(starts, dtype=torch.int32)


def fresh(batch: BatchTensors) -> tuple[Tensor, Tensor]:
    """Return an output and a log-sum-exp full of NaN."""
    tokens, heads, _ = batch.query.shape
    out = batch.query.new_full((tokens, heads, batch.value_cache.shape[-1]), NAN)
    return out, torch.full((heads, tokens), NAN)


def launch(
    case: Case, batch: BatchTensors, outputs: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Launch a case's kernels, and return the output and the log-sum-exp.

    Args:
        outputs: Optional. Both, modified in place. If None, they are `fresh`.
    """
    out, lse = outputs or fresh(batch)
    options = make_options(case, batch.query.shape[1])
    if case.family == "cascade":
        TWINS["optimized"].raw.cascade_attention(
            **batch.arguments(), common_prefix_len=PREFIX_LEN, out=out, lse=lse,
            options=options,
        )  # fmt: skip
        return out, lse
    if case.family == "invariant":
        options = replace(options, batch_invariant=True)
    plan = batch.plan
    key, value, lengths = batch.key_cache, batch.value_cache, batch.seq_lens
    if case.is_ragged:
        key, value, lengths = gather_keys(batch)
    call = AttentionCall(
        batch.query,
        key,
        value,
        None if case.is_ragged else batch.block_table,
        batch.query_start_loc,
        lengths,
        batch.max_query_len,
        batch.max_seq_len,
        batch.query.shape[-1] ** -0.5 if plan.scale is None else plan.scale,
        out,
        lse if case.has_lse else None,
        options,
    )
    family = FAMILIES[case.family]
    assert family.supports(call)
    planned = family.plan(call)
    assert planned.takes(call)
    if case.family == "prefill":
        scales = None, None
        if case.has_scales:
            scales = tuple(
                scale.repeat_interleave(batch.plan.group) for scale in SCALES
            )
        planned.launch_prefill(call, 0, scales)
    else:
        with pytest.MonkeyPatch.context() as patch:
            module = import_module(type(planned).__module__)
            patch.setattr(module, "count_processors", lambda _: case.processors)
            planned.launch(call)
    for counters in COUNTERS:
        assert not bool(counters.any()), "counters are not 0 after the launch"
    return out, lse


def check(case: Case, reference: Any) -> tuple[Tensor, Tensor]:
    """Launch a case, and compare each row with float64 within its error budget.

    Raises:
        AssertionError: a row is not within its budget, or padding was not written as it should be.
    """
    batch = make_batch(case)
    out, lse = launch(case, batch)
    options = make_options(case, batch.query.shape[1])
    attend = partial(reference.paged_attention, options=options)
    if case.has_scales:
        key, value = (
            cache * scale[:, None].to(cache.dtype)
            for cache, scale in zip(
                (batch.key_cache, batch.value_cache), SCALES, strict=True
            )
        )
        batch = replace(batch, key_cache=key, value_cache=value)
    verdict, exact_lse = judge_attention(
        batch, out, SimpleNamespace(paged_attention=attend)
    )
    assert verdict.ok, verdict
    if case.has_lse:
        share = judge_lse(batch, lse, exact_lse)
        assert share <= 1, f"log-sum-exp: {share:.2f} of its budget"
        assert bool((lse[:, batch.tokens :] == -torch.inf).all())
    assert bool((out[batch.tokens :] == 0).all())
    return out, lse


def plan_of(
    query_lens: tuple[int, ...], kv_lens: tuple[int, ...], head_size: int, **given: Any
) -> BatchPlan:
    """Return a batch of bfloat16 with one KV head."""
    given = {"dtype": BF16, "kv_heads": 1, "group": 2, **given}
    return BatchPlan(query_lens, kv_lens, head_size=head_size, **given)


RAGGED = (70, 1, 0, 130), (200, 50, 40, 131)
SMALL_RAGGED = (70, 1, 0, 130), (150, 50, 40, 131)
UNLIKE: dict[str, Any] = {"layout": "interleaved hnd", "value_layout": "interleaved"}
"""Layouts of two KV heads whose steps from block to block and from head to head differ."""
CASES = {
    f"prefill, head size {size}": Case("prefill", plan_of(*RAGGED, size, needle="last"))
    for size in (64, 80, 96, 128, 256)
} | {
    f"prefill, head size {size}": Case(
        "prefill", plan_of(*SMALL_RAGGED, size, dtype=FP16, needle="last", group=group)
    )
    # one size for each shape of the tiles and of the parts of products and accumulators
    for size, group in (
        (8, 2), (24, 3), (48, 1), (56, 4), (72, 2), (104, 1), (120, 3), (136, 2), (160, 4),
        (176, 3), (192, 1), (200, 2), (216, 1), (248, 3),
    )
} | {
    f"prefill, keys of {key_size}, values of {value_size}": Case(
        "prefill",
        plan_of(*SMALL_RAGGED, max(key_size, value_size), dtype=FP16, group=group),
        key_size=key_size,
        value_size=value_size,
    )
    for key_size, value_size, group in (
        (192, 128, 2), (128, 64, 2), (64, 128, 1), (96, 64, 3), (256, 128, 2), (64, 256, 4),
        (160, 96, 1), (72, 200, 2), (136, 40, 3),
    )
} | {
    "prefill, scores of about the same size": Case(
        "prefill", plan_of((200, 130), (200, 300), 128, group=4, kv_heads=2, scale=0.01)
    ),
    "prefill, queries without keys": Case(
        "prefill",
        plan_of((70, 300), (100, 300), 128),
        {"causal": False},
        has_lse=False,
        seq_lens=(100, 0),
    ),
    "prefill, padding, padded heads, three to a tile": Case(
        "prefill", plan_of((70, 1), (200, 50), 80, group=3, kv_heads=2, padding=9)
    ),
    "prefill, padding of a batch of another layout": Case(
        "prefill", plan_of((0, 5), (20, 50), 256, kv_heads=2, padding=4, **UNLIKE)
    ),
    "prefill, float16, whole tiles": Case(
        "prefill", plan_of((192,), (300,), 64, dtype=FP16, group=1, padding=3)
    ),
    "prefill, many work items": Case(
        "prefill", plan_of((64,) * 6, (80,) * 6, 64, dtype=FP16, group=1, kv_heads=2)
    ),
    "prefill, many tiles": Case(
        # the last block has one token
        "prefill", plan_of((70,), (897,), 128, needle="last")
    ),
    "prefill, more requests than are counted at once": Case(
        "prefill", plan_of((2,) * 34 + (70,), (5,) * 34 + (99,), 64, group=1)
    ),
    "prefill, a tile ends one key after the first row": Case(
        "prefill", plan_of((70,), (196,), 64, group=1)
    ),
    "prefill, a window begins one key after a tile": Case(
        "prefill", plan_of((130,), (495,), 128, group=1), {"sliding_window": 300}
    ),
    "prefill, large sinks": Case(
        "prefill", plan_of((5,), (150,), 128, group=4), {"sinks": 150.0}
    ),
    "prefill, windows": Case(
        "prefill", plan_of((130,), (390,), 128, needle="tile edge"),
        {"sliding_window": 100},
    ),
    "prefill, head size 64, windows": Case(
        "prefill", plan_of((130,), (390,), 64, needle="first new"),
        {"sliding_window": 70, "sinks": True},
    ),
    "prefill, chunks": Case(
        "prefill", plan_of((130,), (290,), 128, group=3), {"attention_chunk_size": 100}
    ),
    "prefill, soft cap": Case(
        "prefill", plan_of((66,), (150,), 128), {"logits_soft_cap": 3.0}, False
    ),
    "prefill, soft cap, log-sum-exp": Case(
        "prefill", plan_of((66,), (150,), 64), {"logits_soft_cap": 3.0}
    ),
    "prefill, scales": Case(
        "prefill", plan_of((66,), (150,), 128, kv_heads=2, **UNLIKE), has_scales=True
    ),
    "prefill, ragged, not causal": Case(
        "prefill", plan_of((66, 5), (150, 130), 64), {"causal": False}, is_ragged=True
    ),
    "prefill, blocks of 48": Case(
        "prefill", plan_of((66,), (150,), 128, block_size=48, needle="block edge")
    ),
    "append, several segments": Case(
        "append",
        plan_of(
            (6, 3), (700, 40), 128, group=4, kv_heads=2, needle="tile edge", padding=3
        ),
    ),
    "append, two warpgroups, several segments": Case(
        "append",
        plan_of(
            (20, 3), (700, 40), 128, group=4, kv_heads=2, needle="tile edge", padding=20
        ),
    ),
    "append, two requests in several segments": Case(
        "append", plan_of((6, 4), (500, 450), 128, group=4, kv_heads=2), processors=8
    ),
    "append, one row more than a warpgroup": Case(
        "append", plan_of((33, 3), (290, 150), 128, needle="first new")
    ),
    "append, one warpgroup that is full": Case(
        "append", plan_of((32, 7), (290, 150), 128, needle="last"), {"sinks": True}
    ),
    "append, head size 64, sinks": Case(
        "append", plan_of((6, 0, 70, 1, 2), (1000, 9, 300, 5, 60), 64, needle="first new"),
        {"sinks": True},
    ),
    "append, several query tiles": Case(
        "append", plan_of((70, 5), (300, 40), 128, group=4)
    ),
    "append, padding alone": Case(
        "append", plan_of((0, 0), (50, 9), 128, padding=3)
    ),
    "append, rows on both sides of a tile's edge": Case(
        "append", plan_of((12,), (645,), 128, group=4, needle="last")
    ),
    "append, window": Case(
        "append", plan_of((20, 1), (900, 400), 80, group=3), {"sliding_window": 300}
    ),
    "append, a window that begins in another tile for each warpgroup": Case(
        "append", plan_of((40, 20), (970, 150), 80, group=3), {"sliding_window": 300},
        processors=1,
    ),
    "append, head size 192": Case("append", plan_of((6, 1), (300, 20), 192), value_size=128),
    "append, head size 256": Case("append", plan_of((6,), (300,), 256)),
    "invariant": Case(
        "invariant",
        plan_of((40, 1, 0, 20), (300, 700, 9, 20), 128, kv_heads=2, padding=3, **UNLIKE),
    ),
    "invariant, head size 192": Case(
        "invariant", plan_of((5,) * 6, (60,) * 5 + (300,), 192), value_size=128),
    "invariant, head size 192, whole tiles": Case(
        "invariant", plan_of((64,) * 6, (70,) * 6, 192), value_size=128),
    "invariant, one split": Case("invariant", plan_of((70,), (90,), 112)),
    "invariant, window": Case(
        "invariant", plan_of((150,) * 3, (700,) * 3, 80, group=4), {"sliding_window": 300}
    ),
    "invariant, head size 64, sinks": Case(
        "invariant", plan_of((5, 3), (258, 600), 64, needle="tile edge"), {"sinks": True}
    ),
    "cascade": Case(
        "cascade",
        plan_of(
            (1, 1, 33), (300, 290, 400), 128, group=4, kv_heads=2, **UNLIKE
        ),
    ),
    "cascade, head size 64, sinks": Case(
        "cascade", plan_of((20, 1), (300, 500), 64, needle="tile edge", padding=2),
        {"sinks": True},
    ),
    "cascade, head size 112": Case("cascade", plan_of((3, 1), (280, 300), 112, kv_heads=2)),
    "cascade, not causal, head size 192": Case(
        "cascade", plan_of((2, 1), (280, 300), 192, group=1), {"causal": False}, value_size=128),
    "prefill, keys of 152, values of 40, padding": Case(
        "prefill", plan_of((47,), (115,), 152, dtype=FP16, padding=3), value_size=40
    ),
    "prefill, head size 160, whole tiles, padding": Case(
        "prefill", plan_of((128, 70), (300, 90), 160, dtype=FP16, group=1, padding=3)
    ),
    "prefill, head size 136, two heads to one, window, cap and sinks": Case(
        "prefill",
        plan_of((130,), (390,), 136, dtype=FP16, kv_heads=2, needle="tile edge", **UNLIKE),
        {"sliding_window": 100, "logits_soft_cap": 20.0, "sinks": True},
    ),
    "prefill, head size 40, window, ragged keys": Case(
        "prefill", plan_of((130,), (390,), 40, dtype=FP16), {"sliding_window": 100},
        is_ragged=True,
    ),
    "append, head size 160": Case(
        "append", plan_of((20, 3), (700, 40), 160, dtype=FP16, group=4, needle="tile edge")
    ),
    "append, keys of 72, values of 144": Case(
        "append", plan_of((6, 1), (300, 20), 144, dtype=FP16, group=3), key_size=72
    ),
    "invariant, head size 144": Case(
        "invariant",
        plan_of((40, 1, 0, 20), (300, 700, 9, 20), 144, dtype=FP16, kv_heads=2, padding=3),
    ),
    "invariant, keys of 256, values of 40, whole tiles": Case(
        "invariant", plan_of((64,) * 3, (70,) * 3, 256, dtype=FP16), value_size=40
    ),
    "cascade, head size 176": Case(
        "cascade", plan_of((3, 1), (280, 300), 176, dtype=FP16, kv_heads=2, needle="tile edge")
    ),
    "prefill, head size 64, window to both sides": Case(
        "prefill", plan_of((130, 300), (390, 300), 64, dtype=FP16, group=1, needle="tile edge"),
        {"causal": False, "sliding_window": 65},
    ),
    "prefill, head size 128, window to both sides, ragged keys": Case(
        "prefill", plan_of((300, 70, 1), (300, 90, 200), 128, dtype=FP16, needle="first new"),
        {"causal": False, "sliding_window": 150, "sinks": True}, is_ragged=True,
    ),
    "prefill, chunks in both directions": Case(
        "prefill", plan_of((130, 200), (290, 200), 128, dtype=FP16, needle="last"),
        {"causal": False, "attention_chunk_size": 100},
    ),
    "prefill, chunks in both directions, window": Case(
        "prefill", plan_of((260, 9), (260, 90), 64, dtype=FP16, needle="tile edge"),
        {"causal": False, "attention_chunk_size": 70, "sliding_window": 50},
    ),
    **{
        f"prefill, blocks of {size}": Case(
            "prefill",
            plan_of((66, 3), (150, 90), head_size, dtype=FP16, block_size=size, needle="block edge",
                    **UNLIKE),
        )
        for size, head_size in ((8, 128), (24, 64), (40, 160))
    },
    "append, blocks of 8": Case(
        "append",
        plan_of((20, 3), (700, 40), 128, dtype=FP16, group=4, block_size=8, needle="block edge"),
    ),
    "invariant, blocks of 24": Case(
        "invariant",
        plan_of((40, 1), (300, 70), 80, dtype=FP16, block_size=24, needle="block edge", padding=3),
    ),
    "prefill, 71 heads to one": Case(
        "prefill",
        plan_of(
            (9, 1, 0, 4), (150, 50, 40, 4), 64, dtype=FP16, group=71, needle="last",
            padding=2, fused=False,
        ),
        {"sinks": True},
    ),
    "prefill, 71 heads to one, window, whole tiles": Case(
        "prefill",
        plan_of((30,), (330,), 64, dtype=FP16, group=71, needle="tile edge", fused=False),
        {"sliding_window": 70},
    ),
    "prefill, 48 heads to one, head size 80, ragged keys": Case(
        "prefill",
        plan_of((13, 7), (140, 7), 80, dtype=FP16, group=48, needle="first new", fused=False),
        {"causal": False, "sliding_window": 33}, is_ragged=True,
    ),
    "prefill, 96 heads to one, chunks": Case(
        "prefill", plan_of((8, 3), (290, 30), 128, dtype=FP16, fused=False, group=96),
        {"attention_chunk_size": 100},
    ),
    "latent": Case(
        "latent", plan_of((1, 0, 4, 1), (200, 5, 131, 64), 576, group=16, padding=5)
    ),
    "latent, a part from the middle of a request": Case(
        "latent", plan_of((1, 0, 1), (60, 9, 257), 576, group=16, needle="last")
    ),
    # a needle has nearly all of the weight, so these calls have none
    "latent, many tiles": Case(
        "latent", plan_of((2,), (700,), 576, group=40, block_size=64)
    ),
    "append, many tiles": Case(
        "append",
        plan_of(
            (6, 3), (900, 600), 128, group=4, kv_heads=2, **UNLIKE
        ),
    ),
    "append, more partial results than are loaded at once": Case(
        "append", plan_of((6,), (1280,), 128, group=4), processors=5
    ),
    "latent, more partial results than are loaded at once": Case(
        "latent", plan_of((1,), (1152,), 576, group=8), processors=9
    ),
    "latent, short requests": Case(
        "latent", plan_of((1, 1, 2), (60, 50, 40), 576, group=16)
    ),
    "latent, two row tiles, several segments": Case(
        "latent", plan_of((2,), (700,), 576, group=40, block_size=64, needle="tile edge")
    ),
    # 16 heads: a row tile has 4 query tokens
    "latent, one to five row tiles": Case(
        "latent",
        plan_of(
            (1, 9, 0, 18, 1, 5), (200, 90, 9, 331, 64, 70), 576, group=16, padding=5,
            needle="tile edge",
        ),
    ),
    "latent, one to five row tiles, the long request first": Case(
        "latent",
        plan_of((18, 1, 1, 9), (331, 500, 3, 90), 576, group=16, needle="first new"),
        processors=7,
    ),
    "latent, two row tiles in three segments each": Case(
        "latent",
        plan_of((5, 6, 0, 8), (200, 331, 5, 140), 576, group=16, block_size=64, seed=1),
        processors=7,
    ),
    "invariant, no new tokens": Case(
        "invariant", plan_of((0, 0, 0), (90, 64, 5), 128, padding=3)
    ),
    "latent, no new tokens": Case(
        "latent", plan_of((0, 0, 0), (90, 64, 5), 576, group=16, padding=3)
    ),
    "latent, more row tiles than processors": Case(
        "latent", plan_of((30, 29), (100, 231), 576, group=16), processors=3
    ),
    "latent, not causal": Case(
        "latent", plan_of((3, 1, 2), (131, 64, 300), 576, group=16, padding=2),
        {"causal": False},
    ),
    "latent, no keys": Case(
        "latent", plan_of((1, 2, 1), (200, 5, 131), 576, group=16), {"causal": False},
        has_lse=False, seq_lens=(0, 0, 70),
    ),
    "latent, more units than programs": Case(
        "latent",
        plan_of((1,) * 9, (5, 70, 1, 200, 130, 64, 3, 300, 65), 576, group=8),
        processors=3,
    ),
    "latent, more units than programs in two row tiles": Case(
        "latent",
        plan_of((1,) * 7, (5, 270, 1, 20, 130, 64, 300), 576, group=72),
        {"causal": False}, processors=5,
    ),
    "copied latent, blocks of 1": Case(
        "latent",
        plan_of(
            (1, 1, 1, 0, 1, 1), (1, 63, 64, 5, 65, 200), 576, group=16, block_size=1, padding=5
        ),
        {"causal": False},
    ),
    "copied latent, no keys": Case(
        "latent",
        plan_of((1, 2, 1), (200, 5, 131), 576, group=16, dtype=FP16, block_size=1),
        {"causal": False}, has_lse=False, seq_lens=(0, 0, 70),
    ),
    "copied latent, few blocks": Case(
        "latent", plan_of((1, 2, 1), (20, 70, 30), 576, group=2, dtype=FP16, block_size=24)
    ),
    # a needle has nearly all of the weight, so this call has none
    "copied latent, many tiles": Case(
        "latent", plan_of((1,), (450,), 576, group=72, block_size=1),
        {"causal": False}, has_lse=False,
    ),
    "copied latent, not causal": Case(
        "latent", plan_of((3, 1, 2), (131, 64, 300), 576, group=40, block_size=8, padding=2),
        {"causal": False},
    ),
    **{
        f"copied latent, blocks of {block_size}": Case(
            "latent",
            plan_of(
                (1, 0, 4, 18), (200, 5, 131, 331), 576, group=group, dtype=dtype, padding=5,
                block_size=block_size, needle="block edge",
            ),
        )
        for block_size, group, dtype in ((3, 16, BF16), (8, 1, FP16), (12, 8, BF16))
    },
}  # fmt: skip
