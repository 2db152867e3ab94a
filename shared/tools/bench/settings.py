"""How is a benchmark run?"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .workloads import Workload, choose_workloads

FULL, SMOKE = (3, 30), (1, 2)
"""Rounds and repeats when nothing is said."""


@dataclass(frozen=True)
class Settings:
    """What was asked for.

    Args:
        workloads: what is timed, in this order.
        device: "cuda" or "cpu".
        implementations: names; none: everyone who can be had. Ours is always among them.
        rounds: how often each workload gets new inputs.
        repeats: runs of each implementation in a round.
        seed: what inputs and the order of the runs are drawn from.
        limit: seconds after which no workload is begun any more; None: none.
        smoke: whether the workloads are tiny ones, whose times say nothing.
        fa3: the file of FlashAttention-3's operators; None: as it is installed.
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
) -> Settings:
    """Return settings with everything filled in that was not said.

    Raises:
        ValueError: an unknown workload or device, a number below 1, or full workloads without
            a GPU.
    """
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device = {device!r}: expected cpu or cuda")
    has_gpu = torch.cuda.is_available()
    device = device or ("cuda" if has_gpu else "cpu")
    if device == "cuda" and not has_gpu:
        raise ValueError("device = 'cuda': torch sees no CUDA device here")
    if device == "cpu" and not smoke:
        raise ValueError(
            "device = 'cpu': a benchmark needs a CUDA device, because the times of interpreted"
            " kernels say nothing; --smoke runs tiny versions of all workloads here, to try the"
            " benchmark itself"
        )
    defaults = SMOKE if smoke else FULL
    rounds, repeats = rounds or defaults[0], repeats or defaults[1]
    for name, number in (("rounds", rounds), ("repeats", repeats)):
        if number < 1:
            raise ValueError(f"{name} = {number}: expected at least 1")
    if limit is not None and limit <= 0:
        raise ValueError(f"limit = {limit:g}: expected seconds, more than 0")
    chosen = choose_workloads(names)
    return Settings(
        workloads=tuple(each.tiny() if smoke else each for each in chosen),
        device=device,
        implementations=tuple(implementations),
        rounds=rounds,
        repeats=repeats,
        seed=seed,
        limit=limit,
        smoke=smoke,
        fa3=fa3,
    )
