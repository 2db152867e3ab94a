"""The choices between kernels on drawn shapes, compared with the alternatives.

    python tests/gpu/sweep.py OUT.jsonl --kind decode --shapes 20 --seed 1 --fa3 FILE
    python tests/gpu/sweep.py OUT.jsonl --kind verify --shapes 20 --seed 1 --fa3 FILE
    python tests/gpu/sweep.py OUT.jsonl --kind write --shapes 20 --seed 1

Draws batches, and times each with the kernels that pagetwin chooses, with every alternative, and
with a baseline (FlashAttention-3; for cache writes vLLM's kernel), by the method of `pagetwin
bench`. `regret` is the time of the choice divided by that of the fastest alternative. A new seed
gives shapes that no constant was fitted to.

OUT.jsonl gets one line for the machine and one per batch. A run continues where the last one with
the same file stopped.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pagetwin.optimized.dispatch import dispatch
from pagetwin.optimized.dispatch.choice import AttentionPlan
from pagetwin.optimized.kernels import write_launch
from pagetwin.optimized.kernels.portable.host import launches
from pagetwin.optimized.kernels.portable.host.plans import PortableAppendPlan
from pagetwin.optimized.runtime.cost_layer import BatchBounds
from pagetwin.optimized.runtime.family import Task
from pagetwin.optimized.runtime.repeat.writes import WRITES
from pagetwin.tools.bench.inputs import Inputs
from pagetwin.tools.bench.libraries.flash_attention_3 import FlashAttention3
from pagetwin.tools.bench.libraries.library import Prepared
from pagetwin.tools.bench.libraries.ours import Ours
from pagetwin.tools.bench.libraries.vllm_triton import VLLMTriton
from pagetwin.tools.bench.results import Entry
from pagetwin.tools.bench.run import Benchmark
from pagetwin.tools.bench.settings import BenchSettings
from pagetwin.tools.bench.workloads import Workload
from record import describe_machine

HEADS = (
    (32, 8, 128), (32, 4, 128), (16, 2, 128), (40, 8, 128), (64, 8, 64), (16, 8, 256),
)  # fmt: skip
"""Query heads, KV heads and head size of the layers that are drawn."""
LARGEST_CACHE = 2 << 30
"""Bytes of keys and values of a batch, at most."""
LONGEST_QUERY = {"decode": 1, "verify": 64}
KINDS = (*LONGEST_QUERY, "write")
SHARES = (1.0, 0.5, 0.25)
"""Segments of the append kernel that are tried, as shares of the most that run at once."""
PROGRAMS = (0.5, 1.0, 2.0)
"""Programs per multiprocessor of the kernel for few decodes that are tried."""
TOKENS = (1, 2, 4, 8)
"""Tokens per program of a cache write that are tried."""


def draw_workload(kind: str, name: str, rng: random.Random) -> Workload:
    """Return a batch with lengths of any size: half of the batches are ragged.

    Args:
        kind: one of KINDS.
        name: of the workload.
        rng: what it is drawn from.
    """
    if kind == "write":
        return draw_write(name, rng)
    while True:
        query_heads, kv_heads, head_size = rng.choice(HEADS)
        reqs = round(2 ** rng.uniform(0, 6))
        longest = round(2 ** rng.uniform(8, 16))
        least = longest // 8 if rng.random() < 0.5 else longest
        kv_lens = [longest, *(rng.randint(least, longest) for _ in range(reqs - 1))]
        new = round(2 ** rng.uniform(1, 6)) if kind == "verify" else 1
        new = min(new, LONGEST_QUERY[kind])
        # a group that fits a decode tile is a decode
        is_short = kind == "verify" and new * query_heads // kv_heads <= 16
        size = 2 * sum(kv_lens) * kv_heads * head_size * 2
        if size <= LARGEST_CACHE and not is_short and min(kv_lens) >= new:
            break
    return Workload(
        name=name,
        kind="prefill" if kind == "verify" else "decode",
        about=f"{reqs} x {new} over up to {longest}",
        query_lens=(new,) * reqs,
        kv_lens=tuple(kv_lens),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        sliding_window=rng.choice([None, None, None, 1024]),
    )


def draw_write(name: str, rng: random.Random) -> Workload:
    """Return a cache write of any number of tokens."""
    query_heads, kv_heads, head_size = rng.choice(HEADS)
    tokens = round(2 ** rng.uniform(0, 15))
    return Workload(
        name=name,
        kind="write",
        about=f"{tokens} tokens",
        query_lens=(tokens,),
        kv_lens=(tokens,),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        kv_dtype=rng.choice([torch.bfloat16, torch.float8_e4m3fn]),
    )


class Forced(Ours):
    """Ours with one alternative in place of the choice.

    Args:
        device: as in `Ours`.
        name: of the alternative.
        target, attribute, value: what is replaced while a call is made.
    """

    def __init__(
        self, device: str, name: str, target: object, attribute: str, value: Any
    ) -> None:
        super().__init__(device)
        self.name, self.title = f"ours-{name}", name
        self.replaced = (target, attribute, value)

    def prepare(self, inputs: Inputs) -> Prepared:
        prepared = super().prepare(inputs)

        def call() -> Any:
            with self.force():
                return prepared.call()

        return replace(prepared, call=call)

    @contextmanager
    def force(self) -> Iterator[None]:
        """Replace the choice, and forget recorded launches, which would repeat another one."""
        target, attribute, value = self.replaced
        forget()
        with mock.patch.object(target, attribute, value):
            yield
        forget()


def forget() -> None:
    """Drop recorded launches."""
    dispatch.PIPELINE.plans.repeats.clear()
    WRITES.clear()


def split_among(programs: float) -> Callable[..., int]:
    """Return what replaces `split_short_decodes`; 0 programs: never few decodes."""

    def split(
        reqs: int, kv_heads: int, tiles: int, block_n: int, processors: int, *_: int
    ) -> int:
        if not programs:
            return 0
        most = max(1, int(programs * processors) // (reqs * kv_heads))
        return -(-max(tiles, 1) // -(-max(tiles, 1) // most))

    return split


def append_in(share: float) -> Callable[..., Task]:
    """Return what replaces `AttentionPlan.choose`: an append with this share of all segments."""

    def choose(plan: AttentionPlan, every: Any, *rest: Any) -> Task:
        if isinstance(every, PortableAppendPlan):
            batch: BatchBounds = rest[-1]
            return Task(division=every.estimate(plan.layer, batch).division)
        most = max(1, plan.layer.processors // plan.layer.kv_heads)
        return Task(division=max(1, int(share * most)))

    return choose


def alternatives(kind: str, device: str) -> list[Ours]:
    """Return the alternatives to the choice of a kind of batch."""
    if kind == "decode":
        split = (launches, "split_short_decodes")
        found = [Forced(device, "stream-k", *split, split_among(0))]
        return found + [
            Forced(device, f"few-{program:g}", *split, split_among(program))
            for program in PROGRAMS
        ]
    if kind == "write":
        tokens = (write_launch, "choose_tokens")
        return [
            Forced(device, f"tokens-{count}", *tokens, lambda _, count=count: count)
            for count in TOKENS
        ]
    path = (AttentionPlan, "choose")
    found = [Forced(device, "prefill", *path, lambda *_: None)]
    return found + [
        Forced(device, f"append-{share:g}", *path, append_in(share)) for share in SHARES
    ]


def describe(workload: Workload, entries: dict[str, Entry]) -> dict[str, Any]:
    """Return the line of one batch.

    Args:
        workload: the batch.
        entries: what the benchmark measured, by name of an alternative or a library.
    """
    times = {name: entry.median for name, entry in entries.items()}
    known = {name: time for name, time in times.items() if time is not None}
    others = [time for name, time in known.items() if name.startswith("ours-")]
    line: dict[str, Any] = {
        "name": workload.name,
        "batch": workload.about,
        "keys": sum(workload.kv_lens),
        "heads": [workload.query_heads, workload.kv_heads, workload.head_size],
        "window": workload.sliding_window,
        "cache": str(workload.kv_dtype).removeprefix("torch."),
        "us": {name: round(time, 2) for name, time in known.items()},
        "kernels": entries["ours"].kernels,
        "failed": {
            name: entry.reason
            for name, entry in entries.items()
            if times[name] is None and entry.reason
        },
    }
    if "ours" in known and others:
        line["regret"] = round(known["ours"] / min(*others, known["ours"]), 3)
    baseline = "vllm" if workload.kind == "write" else "fa3"
    if "ours" in known and baseline in known:
        line[f"ratio_to_{baseline}"] = round(known["ours"] / known[baseline], 3)
    return line


def summarize(lines: list[dict[str, Any]]) -> str:
    """Return the mean and the worst regret, and the same of the ratios, in one paragraph."""
    words = []
    for name in ("regret", "ratio_to_fa3", "ratio_to_vllm"):
        found = [(line[name], line["name"]) for line in lines if name in line]
        if found:
            mean = statistics.geometric_mean([value for value, _ in found])
            worst, where = max(found)
            words.append(f"{name}: mean {mean:.3f}, worst {worst:.3f} ({where})")
    failed = [line["name"] for line in lines if line["failed"]]
    return f"{len(lines)} batches; {'; '.join(words)}; failures in {failed or 'none'}"


def main() -> int:
    """Time the batches, and return 1 if ours was wrong or failed in one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("out", type=Path)
    add("--kind", choices=KINDS, required=True)
    add("--shapes", type=int, default=20)
    add("--seed", default="0", help="any word")
    add("--only", type=int, nargs="+", help="numbers of the batches, instead of all")
    add("--repeats", type=int, default=15)
    add("--fa3", help="vLLM's _vllm_fa3_C.abi3.so")
    add("--commit", help="default: what git says")
    add("--smoke", action="store_true", help="tiny batches on the CPU, without times")
    asked = parser.parse_args()
    device = "cpu" if asked.smoke else "cuda"
    known = asked.out.read_text().splitlines() if asked.out.exists() else []
    lines = [line for line in map(json.loads, known) if "name" in line]
    done = {line["name"] for line in lines}
    libraries = [Ours(device), *alternatives(asked.kind, device)]
    if not asked.smoke:
        is_write = asked.kind == "write"
        libraries.append(
            VLLMTriton(device) if is_write else FlashAttention3(device, asked.fa3)
        )
    workloads = []
    for number in asked.only or range(asked.shapes):
        name = f"{asked.kind}-{asked.seed}-{number}"
        if name not in done:
            drawn = draw_workload(asked.kind, name, random.Random(name))
            workloads.append(drawn.tiny() if asked.smoke else drawn)
    with asked.out.open("a") as file:

        def keep(workload: Workload, *_: Any) -> None:
            line = describe(workload, bench.entries[workload.name])
            file.write(json.dumps(line) + "\n")
            file.flush()
            lines.append(line)
            print(json.dumps(line), flush=True)
            dispatch.PIPELINE.plans.clear()

        if not known:
            machine = describe_machine(asked.commit, device)
            file.write(json.dumps(machine | {"smoke": asked.smoke}) + "\n")
        settings = BenchSettings(
            tuple(workloads), device, rounds=1, repeats=asked.repeats
        )
        bench = Benchmark(settings, libraries, on_measured=keep)
        bench.run()
    print(summarize(lines))
    wrong = any(name.startswith("ours") for line in lines for name in line["failed"])
    return int(wrong or bench.ended != "complete")


if __name__ == "__main__":
    sys.exit(main())
