"""Microseconds of parallel steps on several GPUs, and of their collectives, under CUDA graphs.

One GPU's time is that of `paged_attention` with all heads and keys.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.parallel import KeySplits
from pagetwin.engine.rank_group import RankGroup
from pagetwin.optimized import (
    DecodeContextParallel,
    PrefillContextParallel,
    RingContextParallel,
    paged_attention,
)
from parallel_job import DEVICE, Job
from torch import Tensor

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16
DECODES = {"decode-1x128k": (1, 131072), "decode-8x32k": (8, 32768)}
PREFILL = 32768


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return random numbers on the device."""
    return torch.randn(shape, dtype=dtype, device=DEVICE)


class Decode:
    """A batch of decodes: `reqs` requests with `keys` keys each, blocks at random."""

    def __init__(self, reqs: int, keys: int) -> None:
        per_req = -(-keys // BLOCK)
        self.reqs, self.keys = reqs, keys
        self.k, self.v = (
            randn(reqs * per_req, BLOCK, KV_HEADS, SIZE) for _ in range(2)
        )
        blocks = torch.randperm(reqs * per_req, device=DEVICE)
        self.table = blocks.view(reqs, per_req).int()
        self.starts = torch.arange(reqs + 1, dtype=torch.int32, device=DEVICE)

    def attention(self, query: Tensor, keys: int, **given: Any) -> Callable[[], Tensor]:
        """Return attention of all heads over some keys of each request."""
        lens = torch.full((self.reqs,), keys, dtype=torch.int32, device=DEVICE)
        return lambda: paged_attention(
            query, self.k, self.v, self.table, self.starts, lens, 1, keys, **given
        )

    def step(
        self,
        ranks: RankGroup,
        interleave: int,
        exchange: str,
        splits: KeySplits | None,
    ) -> Callable[[], Tensor]:
        """Return a layer's step of a rank."""
        heads = HEADS // ranks.world_size
        query = randn(self.reqs, heads, SIZE)
        out = torch.empty_like(query)
        lens = torch.full((self.reqs,), self.keys, dtype=torch.int32, device=DEVICE)
        step = DecodeContextParallel(
            ranks, heads, SIZE, self.reqs, interleave, exchange, splits,
            dtype=torch.bfloat16, device=DEVICE,
        )  # fmt: skip
        share = -(-self.keys // ranks.world_size // BLOCK)
        table = self.table[:, :share].contiguous()
        batch = step.prepare(self.k, table, self.starts, lens, self.reqs, self.keys)
        return lambda: step.attend(query, self.k, self.v, batch, out=out)


def time_decode(name: str, job: Job) -> None:
    """Time one layer's step on one GPU and on all."""
    decode = Decode(*DECODES[name])
    query = randn(decode.reqs, HEADS, SIZE)
    out = torch.empty_like(query)
    one = {}
    for is_invariant in (False, True):
        options = AttentionOptions(batch_invariant=is_invariant)
        call = decode.attention(query, decode.keys, out=out, options=options)
        one[is_invariant] = job.microseconds(call)
    job.say(name, "1 GPU", us=one[False], batch_invariant_us=one[True])
    cases: dict[str, tuple[int, str, KeySplits | None]] = {
        "all_to_all": (16, "all_to_all", None),
        "reduce_scatter": (16, "reduce_scatter", None),
        "splits 8 x 16": (16, "all_to_all", KeySplits(8, 16)),
        "splits 128 x 1": (1, "all_to_all", KeySplits(128, 1)),
    }
    for way, ranks in job.groups.items():
        for label, case in cases.items():
            if way != "nccl" and label == "splits 128 x 1":
                continue
            us = job.microseconds(decode.step(ranks, *case))
            figures = {"us": us, "times": one[False] / us}
            if case[2] is not None:
                alone = job.microseconds(decode.step(job.alone, *case))
                figures |= {"one_rank_us": alone, "times_of_one_rank": alone / us}
            job.say(f"{name} {way} {label}", "all GPUs", **figures)
    time_parts(name, decode, job)


def time_parts(name: str, decode: Decode, job: Job) -> None:
    """Time the attention of one share, and each collective of a step."""
    world, reqs = job.ranks.world_size, decode.reqs
    out = randn(reqs, HEADS, SIZE, dtype=torch.float32)
    lse = randn(HEADS, reqs, dtype=torch.float32)
    query = randn(reqs, HEADS, SIZE)
    call = decode.attention(query, decode.keys // world, out=out, lse=lse)
    job.say(f"{name} share", "attention", us=job.microseconds(call))
    heads = HEADS // world
    sent = randn(heads, reqs, SIZE)
    every = sent.new_empty(world, *sent.shape)
    every_lse = lse.new_empty(world, *lse.shape)
    rows = randn(world, heads, reqs, SIZE, dtype=torch.float32)
    total = torch.empty_like(rows[0])
    for way, ranks in job.groups.items():
        parts: dict[str, Callable[[], Any]] = {
            "queries": partial(ranks.all_gather, sent, every),
            "lse": partial(ranks.all_gather, lse, every_lse),
            "rows_added": partial(ranks.reduce_scatter, rows, total),
        }
        for count in (1, 4, 128 // world):
            packed = randn(world, heads, count, reqs, SIZE + 8, dtype=torch.float32)
            got = torch.empty_like(packed)
            parts[f"packed_{count}"] = partial(ranks.all_to_all, packed, got)
        figures = {
            label: job.microseconds(part, calls=100) for label, part in parts.items()
        }
        job.say(f"{name} {way} collectives", "us", **figures)


def time_prefill(job: Job) -> None:
    """Time one layer of a prefill on one GPU and on all."""
    plain_us = 0.0
    for is_invariant in (False, True):
        took: dict[int, float] = {}
        options = AttentionOptions(batch_invariant=is_invariant)
        for group in (job.alone, job.ranks):
            prefill = PrefillContextParallel(group, BLOCK, DEVICE)
            share = prefill.prepare([PREFILL])
            own = len(share.tokens)
            query, key, value = (
                randn(own, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            call = partial(
                prefill.attend, query, key, value, share,
                out=torch.empty_like(query), options=options,
            )  # fmt: skip
            took[group.world_size] = job.microseconds(call, calls=2)
        world = job.ranks.world_size
        plain_us = plain_us or took[1]
        job.say(
            f"prefill-1x32k{' batch-invariant' if is_invariant else ''}",
            "one layer",
            one_us=took[1],
            all_us=took[world],
            times=took[1] / took[world],
        )
    time_ring(job, plain_us)
    rows = randn(PREFILL // world, KV_HEADS, 2 * SIZE)
    every = rows.new_empty(world, *rows.shape)
    gather = job.microseconds(partial(job.ranks.all_gather, rows, every), calls=4)
    other = torch.empty_like(rows)
    shift = job.microseconds(lambda: job.ranks.start_shift(rows, other)(), calls=4)
    job.say("prefill-1x32k collectives", "us", all_gather=gather, shift=shift)


def time_ring(job: Job, one_us: float) -> None:
    """Time one layer of a prefill whose shares pass from rank to rank.

    Args:
        one_us: That layer on one GPU.
    """
    ring = RingContextParallel(job.ranks, BLOCK, DEVICE)
    share = ring.prepare([PREFILL])
    own = len(share.tokens)
    query, key, value = (
        randn(own, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    out = torch.empty_like(query)
    call = partial(ring.attend, query, key, value, share, out=out)
    us = job.microseconds(call, calls=2)
    job.say(
        "prefill-1x32k ring", "one layer", one_us=one_us, all_us=us, times=one_us / us
    )
