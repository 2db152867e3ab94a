"""BenchSettings: what a benchmark runs, and on which device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..bench_names import check_device
from .workloads import Workload, choose_workloads

FULL, SMOKE = (3, 30), (1, 2)
"""Default rounds and repeats."""


@dataclass(frozen=True)
class BenchSettings:
    """Settings of one benchmark.

    Args:
        workloads: Workloads that are timed, in this order.
        device: "cuda" or "cpu".
        implementations: Names of libraries. If empty, all that are installed. Ours is always
            included.
        rounds: How often each workload gets new inputs.
        repeats: Runs per library and round.
        seed: Seed of inputs and of the order of the runs.
        limit: Optional. Seconds after which no workload is started.
        smoke: Whether the workloads are tiny. Their times have no meaning.
        fa3: Optional. The file with FlashAttention-3's operators. If None, an installed package.
        flashmla: Optional. The same for FlashMLA's operators.
        suite: The suite of the workloads: one of `SUITES`.
    """

    workloads: tuple[Workload, ...]
    device: str
    implementations: tuple[str, ...] = ()
    rounds: int = FULL[0]
    repeats: int = FULL[1]
    seed: int = 0
    limit: float | None = None
    smoke: bool = False
    fa3: str | None = None
    flashmla: str | None = None
    suite: str = "standard"


def choose_settings(
    names: Sequence[str] = (),
    device: str | None = None,
    implementations: Sequence[str] = (),
    rounds: int | None = None,
    repeats: int | None = None,
    seed: int = 0,
    limit: float | None = None,
    smoke: bool = False,
    fa3: str | None = None,
    flashmla: str | None = None,
    suite: str = "standard",
) -> BenchSettings:
    """Return settings with defaults for everything that is None.

    Raises:
        ValueError: Unknown suite, workload or device, a number below 1, or full workloads without
            a GPU.
    """
    chosen = choose_workloads(names, suite)
    has_gpu = torch.cuda.is_available()
    device = device or ("cuda" if has_gpu else "cpu")
    if device == "cuda" and not has_gpu:
        raise ValueError("device = 'cuda': torch sees no CUDA device here")
    check_device(device, smoke)
    defaults = SMOKE if smoke else FULL
    rounds = defaults[0] if rounds is None else rounds
    repeats = defaults[1] if repeats is None else repeats
    for name, number in (("rounds", rounds), ("repeats", repeats)):
        if number < 1:
            raise ValueError(f"{name} = {number}: expected at least 1")
    if limit is not None and not limit > 0:
        raise ValueError(f"limit = {limit:g}: expected seconds, more than 0")
    return BenchSettings(
        workloads=tuple(workload.tiny() if smoke else workload for workload in chosen),
        device=device,
        implementations=tuple(implementations),
        rounds=rounds,
        repeats=repeats,
        seed=seed,
        limit=limit,
        smoke=smoke,
        fa3=fa3,
        flashmla=flashmla,
        suite=suite,
    )
