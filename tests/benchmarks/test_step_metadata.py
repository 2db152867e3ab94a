"""How long does a step's metadata take on the host?

    pytest tests/benchmarks/test_step_metadata.py -m slow --benchmark-group-by=param:work

times four ways to the same metadata: one Python loop over sequences and tokens, as vLLM's V0 did
it, the reference, the twin's function of lists, and the twin's buffers, to which only new blocks
are appended. The block table has room for 131,072 tokens a request in every case.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import pytest
import torch
from pagetwin.contract.operations import load_implementation

pytest.importorskip("pytest_benchmark", reason="the dev extra is not installed")
pytestmark = pytest.mark.slow

BLOCK_SIZE = 16
MAX_BLOCKS = 131_072 // BLOCK_SIZE
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Work:
    """One step in numbers; `new_blocks`: rows that have just got a block."""

    query_lens: tuple[int, ...]
    context: int
    new_blocks: int

    @property
    def computed(self) -> list[int]:
        return [self.context] * len(self.query_lens)

    @property
    def rows(self) -> list[list[int]]:
        return [
            [
                (31 * req + entry) % 50_000
                for entry in range(-(-(self.context + new) // BLOCK_SIZE))
            ]
            for req, new in enumerate(self.query_lens)
        ]


WORKS = {
    "256 decodes, context 100": Work((1,) * 256, 100, 16),
    "256 decodes, context 100,000": Work((1,) * 256, 100_000, 16),
    "254 decodes and 2 chunks of 2,048": Work((1,) * 254 + (2048,) * 2, 4096, 16),
    "a prefill of 16,384": Work((16_384,), 0, 1024),
}


def loop_of_v0(work: Work) -> Callable[[], Any]:
    """Return the loop over sequences and tokens, and the padding of lists."""
    rows = work.rows

    def build() -> Any:
        slots, starts, lens, table = [], [0], [], []
        width = max(map(len, rows))
        for new, old, row in zip(work.query_lens, work.computed, rows, strict=True):
            for position in range(old, old + new):
                block = row[position // BLOCK_SIZE]
                slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
            starts.append(starts[-1] + new)
            lens.append(old + new)
            table.append(row + [0] * (width - len(row)))
        ints = {"dtype": torch.int32, "device": DEVICE}
        return (
            torch.tensor(slots, dtype=torch.int64, device=DEVICE),
            torch.tensor(starts, **ints),
            torch.tensor(lens, **ints),
            torch.tensor(table, **ints),
        )

    return build


def lists_of(name: str) -> Callable[[Work], Callable[[], Any]]:
    """Return the function of lists of a twin."""

    def prepare(work: Work) -> Callable[[], Any]:
        build = load_implementation(name).build_common_attn_metadata
        lens, rows = list(work.query_lens), work.rows
        return lambda: build(lens, work.computed, rows, BLOCK_SIZE, DEVICE)

    return prepare


def buffers(work: Work) -> Callable[[], Any]:
    """Return a step of the twin's buffers: new blocks are appended, and the step is built."""
    reqs = len(work.query_lens)
    made = load_implementation("optimized").StepBuffers(
        reqs, sum(work.query_lens), MAX_BLOCKS, BLOCK_SIZE, DEVICE
    )
    made.append_blocks(range(reqs), work.rows)
    lens = list(work.query_lens)
    chunk = [[req] * (work.new_blocks if reqs == 1 else 1) for req in range(reqs)]
    grown = list(range(0, reqs, max(1, reqs // work.new_blocks)))
    new = [chunk[req] for req in grown]
    held = made._num_blocks.copy()

    def build() -> Any:
        # the same blocks once more, so that the step stays the same
        made._num_blocks[grown] = held[grown] - [len(tokens) for tokens in new]
        made.append_blocks(grown, new)
        return made.build(lens, work.computed)

    return build


WAYS: dict[str, Callable[[Work], Callable[[], Any]]] = {
    "loop of V0": loop_of_v0,
    "reference": lists_of("reference"),
    "twin, from lists": lists_of("optimized"),
    "twin, buffers": buffers,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("work", WORKS)
def test_time_of_a_step(work: str, way: str, benchmark: Any) -> None:
    step = WAYS[way](WORKS[work])
    begin = perf_counter()
    step()
    rounds = int(min(300, max(5, 1 / (perf_counter() - begin))))
    benchmark.pedantic(step, rounds=rounds, warmup_rounds=2)


def median_us(step: Callable[[], Any], rounds: int) -> float:
    step()
    times = []
    for _ in range(rounds):
        begin = perf_counter()
        step()
        times.append(perf_counter() - begin)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return median(times) * 1e6


@pytest.mark.parametrize("work", WORKS)
def test_the_buffers_keep_their_promise(
    work: str, report_lines: Callable[..., None]
) -> None:
    """At most 150 us for decodes and 250 us with prefills, on one core of a server."""
    limit = 150 if "prefill" not in work and "chunks" not in work else 250
    times = {
        way: median_us(prepare(WORKS[work]), 200 if way == "twin, buffers" else 5)
        for way, prepare in WAYS.items()
    }
    base = times["loop of V0"]
    told = ", ".join(
        f"{way} {us:,.0f} us ({base / us:.3g}x)" for way, us in times.items()
    )
    report_lines(f"{work} ({DEVICE}): {told}")
    if os.environ.get("PAGETWIN_STRICT_TIMES") == "1":
        assert times["twin, buffers"] <= limit
    assert times["twin, buffers"] < base


def test_a_step_costs_the_same_after_100_and_after_100_000_tokens() -> None:
    short, long = (
        median_us(buffers(WORKS[f"256 decodes, context {context}"]), 300)
        for context in ("100", "100,000")
    )
    assert long < 1.5 * short
