"""The parallel step on several GPUs through NCCL: laws, bits, and times under CUDA graphs.

    python tests/gpu/parallel.py --ranks 2

Each rank is a process with a GPU of its own. The first process prints the results: whether the laws
hold, whether fixed splits give the bits of one rank, and the microseconds of one layer's step with
those of each collective. One rank's time is that of `paged_attention` with all heads. Without a GPU
the laws run through gloo: `--ranks 2 --only optimized,reference`.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from pagetwin.conformance.harness.calling import expect_right
from pagetwin.conformance.harness.candidate import load_candidate
from pagetwin.conformance.harness.trial import make_setting
from pagetwin.conformance.laws.dcp_attention import Dealt
from pagetwin.conformance.laws.parallel_step import (
    Shared,
    bits,
    run_rank,
    whole_call,
)
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.parallel import KeySplits
from pagetwin.engine.rank_group import RankGroup
from pagetwin.optimized import (
    DecodeContextParallel,
    PrefillContextParallel,
    paged_attention,
)
from torch import distributed as dist
from torch import multiprocessing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 16
LAYERS = 4
"""Layers in one captured graph."""
DECODES = {"decode-1x128k": (1, 131072), "decode-8x32k": (8, 32768)}
LAWS = [
    Shared(Dealt((1, 2, 0, 1), (37, 20, 3, 1), 2, in_a_row, kind, (36, 0, -1, 0),
                 group=4, dtype=dtype, padding=1, seed=seed), exchange, splits)
    for seed, (in_a_row, kind, dtype, exchange, splits) in enumerate([
        (1, "plain", torch.bfloat16, "all_to_all", None),
        (2, "sinks", torch.float32, "all_to_all", None),
        (16, "cap", torch.bfloat16, "reduce_scatter", None),
        (2, "sinks", torch.bfloat16, "reduce_scatter", None),
        (4, "values", torch.bfloat16, "all_to_all", (16, 1)),
        (2, "fp8", torch.bfloat16, "all_to_all", (8, 2)),
    ])
]  # fmt: skip


def say(*words: Any) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def gathered(value: Any, ranks: RankGroup) -> list[Any]:
    """Return a value of every rank, through the host."""
    found: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(found, value)
    return found


def joined_rows(
    name: str, shared: Shared, ranks: RankGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and log-sum-exps of all ranks' heads, on the host."""
    setting = make_setting(load_candidate(name), DEVICE)
    whole = whole_call(shared.dealt, setting.device)
    found = run_rank(setting, shared, whole, ranks)
    parts = [(found.out.cpu(), found.lse.cpu())]
    if ranks.world_size > 1:
        parts = gathered(parts[0], ranks)
    return torch.cat([out for out, _ in parts], dim=1), torch.cat(
        [lse for _, lse in parts]
    )


def hold_laws(name: str, ranks: RankGroup) -> None:
    """Compare a twin with the oracle, and one rank's bits with those of all."""
    alone = RankGroup(device=DEVICE)
    for shared in LAWS:
        setting = make_setting(load_candidate(name), DEVICE)
        whole = whole_call(shared.dealt, setting.device)
        out, lse = joined_rows(name, shared, ranks)
        expect_right(setting, whole, (out.to(DEVICE), lse.to(DEVICE)), is_joined=True)
    say(
        f"law: {name}: {len(LAWS)} batches on {ranks.world_size} ranks agree with the oracle"
    )
    count = 0
    for dealt in (
        Dealt((2, 1), (37, 9000), 1, 1, "plain", (20, 4097), group=8, seed=3),
        Dealt((1, 0, 1), (40, 3, 5), 1, 1, "sinks", (-1, 0, 4), group=8,
              dtype=torch.bfloat16),
    ):  # fmt: skip
        one = joined_rows(name, Shared(dealt, splits=(16, 1)), alone)
        for in_a_row in (1, 4):
            many = replace(dealt, ranks=ranks.world_size, in_a_row=in_a_row)
            found = joined_rows(name, Shared(many, splits=(16, 1)), ranks)
            same = [
                torch.equal(bits(a), bits(b)) for a, b in zip(one, found, strict=True)
            ]
            assert all(same), (name, dealt, in_a_row, same)
            count += 1
    say(f"bits: {name}: {count} batches have the bits of one rank")


def captured(call: Callable[[], Any], repeats: int) -> Callable[[], None]:
    """Return the replay of a graph with `repeats` calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeats):
            call()
    replay: Callable[[], None] = graph.replay
    return replay


def microseconds(
    call: Callable[[], Any], ranks: RankGroup | None = None, repeats: int = LAYERS
) -> float:
    """Return the microseconds of one call in a graph, of the slowest rank."""
    replay = captured(call, repeats)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(25):
        if ranks is not None:
            dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / repeats)
    found = statistics.median(times[5:])
    return found if ranks is None else max(gathered(found, ranks))


def cache_of(reqs: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return key cache, value cache and block table of some requests, blocks at random."""
    per_req = -(-keys // BLOCK)
    shape = (reqs * per_req, BLOCK, KV_HEADS, SIZE)
    caches = [torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    table = torch.randperm(reqs * per_req, device=DEVICE).view(reqs, per_req).int()
    return caches[0], caches[1], table


def time_one_gpu(name: str, batch_invariant: bool) -> float:
    """Return the microseconds of `paged_attention` with all heads and keys."""
    reqs, keys = DECODES[name]
    starts = torch.arange(reqs + 1, dtype=torch.int32, device=DEVICE)
    lens = torch.full((reqs,), keys, dtype=torch.int32, device=DEVICE)
    query = torch.randn(reqs, HEADS, SIZE, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty_like(query)
    k, v, table = cache_of(reqs, keys)
    options = AttentionOptions(batch_invariant=batch_invariant)
    return microseconds(
        lambda: paged_attention(
            query, k, v, table, starts, lens, 1, keys, out=out, options=options
        )
    )


def time_step(
    name: str,
    ranks: RankGroup,
    interleave: int,
    exchange: str,
    splits: KeySplits | None,
) -> float:
    """Return the microseconds of one layer's step on the ranks of a group."""
    reqs, keys = DECODES[name]
    starts = torch.arange(reqs + 1, dtype=torch.int32, device=DEVICE)
    lens = torch.full((reqs,), keys, dtype=torch.int32, device=DEVICE)
    heads = HEADS // ranks.world_size
    query = torch.randn(reqs, heads, SIZE, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty_like(query)
    k, v, table = cache_of(reqs, keys // ranks.world_size)
    step = DecodeContextParallel(
        ranks, heads, SIZE, reqs, interleave, exchange, splits, dtype=torch.bfloat16,
        device=DEVICE,
    )  # fmt: skip
    batch = step.prepare(k, table, starts, lens, reqs, keys)
    return microseconds(
        lambda: step.attend(query, k, v, batch, out=out),
        ranks if ranks.world_size > 1 else None,
    )


def time_decode(name: str, ranks: RankGroup) -> None:
    """Print the times of one layer on one GPU and on all."""
    world = ranks.world_size
    one = {each: time_one_gpu(name, each) for each in (False, True)}
    say(f"time: {name}: 1 GPU {one[False]:.1f} us, batch_invariant {one[True]:.1f} us")
    cases: dict[str, tuple[int, str, KeySplits | None]] = {
        "all_to_all": (16, "all_to_all", None),
        "reduce_scatter": (16, "reduce_scatter", None),
        "splits 8 x 16": (16, "all_to_all", KeySplits(8, 16)),
        "splits 128 x 1": (1, "all_to_all", KeySplits(128, 1)),
    }
    for label, case in cases.items():
        took = time_step(name, ranks, *case)
        against = one[case[2] is not None] / took
        line = (
            f"time: {name}: {world} GPUs, {label}: {took:.1f} us, {against:.2f} times"
        )
        if case[2] is not None:
            alone = time_step(name, RankGroup(device=DEVICE), *case)
            line += (
                f"; 1 GPU with these splits {alone:.1f} us, {alone / took:.2f} times"
            )
        say(line)
    time_parts(name, *DECODES[name], ranks)


def time_prefill(ranks: RankGroup) -> None:
    """Print the times of one layer of prefill-1x32k on one GPU and on all."""
    keys, world = 32768, ranks.world_size
    for batch_invariant in (False, True):
        took = {}
        options = AttentionOptions(batch_invariant=batch_invariant)
        for group in (RankGroup(device=DEVICE), ranks):
            prefill = PrefillContextParallel(group, BLOCK, DEVICE)
            share = prefill.prepare([keys])
            own = len(share.tokens)
            query, key, value = (
                torch.randn(own, heads, SIZE, dtype=torch.bfloat16, device=DEVICE)
                for heads in (HEADS, KV_HEADS, KV_HEADS)
            )
            out = torch.empty_like(query)
            call = partial(
                prefill.attend, query, key, value, share, out=out, options=options
            )
            shared = group if group.world_size > 1 else None
            took[group.world_size] = microseconds(call, shared, 1)
        say(
            f"time: prefill-1x32k, batch_invariant={batch_invariant}: 1 GPU {took[1]:.0f} us,"
            f" {world} GPUs {took[world]:.0f} us, {took[1] / took[world]:.2f} times"
        )
    rows = torch.randn(
        keys // world, KV_HEADS, 2 * SIZE, dtype=torch.bfloat16, device=DEVICE
    )
    every = rows.new_empty(world, *rows.shape)
    part = microseconds(lambda: ranks.all_gather(rows, every), ranks, 4)
    say(f"part: prefill-1x32k: all-gather of keys and values {part:.1f} us")


def time_parts(name: str, reqs: int, keys: int, ranks: RankGroup) -> None:
    """Print the times of the attention of one share, and of each collective."""
    world = ranks.world_size
    starts = torch.arange(reqs + 1, dtype=torch.int32, device=DEVICE)
    lens = torch.full((reqs,), keys // world, dtype=torch.int32, device=DEVICE)
    query = torch.randn(reqs, HEADS, SIZE, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty(reqs, HEADS, SIZE, device=DEVICE)
    lse = torch.empty(HEADS, reqs, device=DEVICE)
    k, v, table = cache_of(reqs, keys // world)
    share = microseconds(
        lambda: paged_attention(
            query, k, v, table, starts, lens, 1, keys // world, out=out, lse=lse
        ),
        ranks,
    )
    say(f"part: {name}: attention of one share {share:.1f} us")
    heads = HEADS // world
    parts: dict[str, Callable[[], Any]] = {}
    sent = torch.randn(heads, reqs, SIZE, dtype=torch.bfloat16, device=DEVICE)
    every = sent.new_empty(world, *sent.shape)
    parts["all-gather of queries"] = lambda: ranks.all_gather(sent, every)
    for count in (1, 128 // world):
        packed = torch.randn(world, heads, count, reqs, SIZE + 8, device=DEVICE)
        got = torch.empty_like(packed)
        parts[f"all-to-all, {count} partials"] = lambda packed=packed, got=got: (
            ranks.all_to_all(packed, got)
        )
    lses = torch.randn(HEADS, reqs, device=DEVICE)
    all_lses = lses.new_empty(world, *lses.shape)
    parts["all-gather of log-sum-exps"] = lambda: ranks.all_gather(lses, all_lses)
    rows = torch.randn(world, heads, reqs, SIZE, device=DEVICE)
    total = torch.empty_like(rows[0])
    parts["reduce-scatter of rows"] = lambda: ranks.reduce_scatter(rows, total)
    for label, part in parts.items():
        say(f"part: {name}: {label} {microseconds(part, ranks, 20):.1f} us")


def work(rank: int, world_size: int, store: str, only: str) -> None:
    """Run the sections on one rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
    given: dict[str, Any] = {"backend": "gloo"}
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        where = torch.device("cuda", rank)
        given = {"backend": "cpu:gloo,cuda:nccl", "device_id": where}
    torch.manual_seed(rank)
    dist.init_process_group(
        init_method=f"file://{store}", rank=rank, world_size=world_size, **given
    )
    ranks = RankGroup(dist.group.WORLD, timeout=30.0, device=DEVICE)
    begin = time.monotonic()
    sections: dict[str, Callable[[RankGroup], None]] = {
        **{each: partial(time_decode, each) for each in DECODES},
        "prefill-1x32k": time_prefill,
        **{each: partial(hold_laws, each) for each in ("optimized", "reference")},
    }
    for name, section in sections.items():
        if only and name not in only.split(","):
            continue
        try:
            section(ranks)
        except Exception as error:
            print(
                f"FAILED: rank {rank}: {name}: {type(error).__name__}: {error}",
                flush=True,
            )
        say(f"{name}: {time.monotonic() - begin:.0f} s after the start")
    dist.destroy_process_group()


def main() -> None:
    """Start one process per GPU."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--store", default=f"/tmp/parallel-{os.getpid()}")
    parser.add_argument("--only", default="", help="twins and workloads, with commas")
    given = parser.parse_args()
    name = torch.cuda.get_device_name(0) if DEVICE == "cuda" else "cpu"
    print(f"{given.ranks} x {name}, torch {torch.__version__}")
    multiprocessing.spawn(
        work, (given.ranks, given.store, given.only), nprocs=given.ranks
    )


if __name__ == "__main__":
    main()
