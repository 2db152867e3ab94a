"""Results of the benchmark: one entry per library and workload, and the record made from them."""

import statistics
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .accuracy import Finding
from .ceilings import Ceilings
from .timing import quartiles
from .workloads import Workload, best_published

FORMAT = 1


class BenchStatus(str, Enum):
    """Outcome of one library in one workload."""

    TIMED = "timed"
    WRONG = "wrong"
    DECLINED = "declined"
    MISSING = "missing"
    FAILED = "failed"
    NOT_RUN = "not run"

    def __str__(self) -> str:
        return self.value


@dataclass
class Entry:
    """One library in one workload.

    Args:
        status: The outcome.
        reason: Why it was not timed.
        note: What was prepared in advance.
        finding: Accuracy of its worst output.
        rounds: Microseconds of all runs, one list per round.
        host_us: Microseconds until a call returns.
        graph: Whether a captured graph was timed.
        same_work: Whether it did the same work as the other libraries.
        within_budget: Whether its error is within the error budget. If False, it rounds more than
            ours, and is a baseline only where the workload names it.
        kernels: Names of the kernels that ran, if they are known.
    """

    status: BenchStatus = BenchStatus.NOT_RUN
    reason: str = ""
    note: str = ""
    finding: Finding | None = None
    rounds: list[list[float]] = field(default_factory=list)
    host_us: float | None = None
    graph: bool = False
    same_work: bool = True
    within_budget: bool = True
    kernels: list[str] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether the next round should run it again."""
        return self.status in (BenchStatus.TIMED, BenchStatus.NOT_RUN)

    def close(self, status: BenchStatus, reason: str) -> None:
        """Store why it is not timed, and drop the times of earlier rounds."""
        self.status, self.reason, self.rounds = status, reason, []

    @property
    def median(self) -> float | None:
        """The median microseconds of all runs, or None if it was not timed."""
        times = [time for round_times in self.rounds for time in round_times]
        return statistics.median(times) if times else None


def ratio(one: Entry, other: Entry) -> float | None:
    """Return the ratio of two times: the median of the rounds' ratios.

    Both ran in the same turns of each round, so the temperature of the card affects both.
    """
    pairs = list(zip(one.rounds, other.rounds, strict=False))
    if not pairs:
        return None
    return statistics.median(
        statistics.median(mine) / statistics.median(theirs) for mine, theirs in pairs
    )


def workload_record(
    workload: Workload,
    entries: dict[str, Entry],
    seeds: list[int],
    ceilings: Ceilings | None,
    published: dict[str, Any] | None,
    meaningless: bool = False,
) -> dict[str, Any]:
    """Return the results of one workload as JSON, without ratios if `meaningless`."""
    floor_us, floor_of = ceilings.floor(workload) if ceilings else (None, None)
    ours = entries["ours"]
    others = {
        name: entry
        for name, entry in entries.items()
        if not _is_ours(name) and entry.median is not None and not meaningless
    }
    best = _fastest(
        {
            name: entry
            for name, entry in others.items()
            if entry.same_work and entry.within_budget
        }
    )
    found: dict[str, Any] = {
        "name": workload.name,
        "kind": workload.kind,
        "about": workload.about,
        "requests": len(workload.kv_lens),
        "new_tokens": workload.tokens,
        "keys": sum(workload.kv_lens),
        "heads": [workload.query_heads, workload.kv_heads, workload.head_size],
        "bytes": workload.bytes,
        "flops": workload.flops,
        "seeds": seeds,
        "floor_us": _rounded(floor_us),
        "floor_of": floor_of,
        "fastest": _fastest(others | ({"ours": ours} if others else {})),
        "best_peer": best,
        "ratio_to_best_peer": _rounded(ratio(ours, others[best]) if best else None, 4),
        "ratio_to_fa3": _rounded(
            ratio(ours, others["fa3"]) if "fa3" in others else None, 4
        ),
        "aim": None
        if workload.aim is None
        else _aim_record(workload, entries, best, meaningless),
        "published": None,
        "results": {
            name: _entry_record(entry, workload, floor_us)
            for name, entry in entries.items()
        },
    }
    best_known = best_published(published, workload.name) if published else None
    if best_known is not None:
        library, us = best_known
        share = None if ours.median is None else ours.median / us
        found["published"] = {"by": library, "us": us, "ratio": _rounded(share, 4)}
    return found


def _is_ours(name: str) -> bool:
    """Return whether a library is ours, or a variant of it."""
    return name.split("-")[0] == "ours"


def _aim_record(
    workload: Workload, entries: dict[str, Entry], best: str | None, meaningless: bool
) -> dict[str, Any]:
    """Return the baseline of a workload, the ratio of times to it, and whether its aim is met.

    If none of the named baselines was timed, the best other implementation counts.
    """
    named = {name: entries[name] for name in workload.baselines if name in entries}
    baseline = None if meaningless else _fastest(named) or best
    found = ratio(entries["ours"], entries[baseline]) if baseline else None
    return {
        "named": list(workload.baselines),
        "baseline": baseline,
        "ratio": _rounded(found, 4),
        "at_most": workload.aim,
        "met": None if found is None or workload.aim is None else found <= workload.aim,
    }


def _fastest(entries: dict[str, Entry]) -> str | None:
    """Return the name with the smallest median, or None if nothing was timed."""
    medians = {name: entry.median for name, entry in entries.items()}
    timed = {name: us for name, us in medians.items() if us is not None}
    return min(timed, key=lambda name: timed[name]) if timed else None


def _entry_record(
    entry: Entry, workload: Workload, floor_us: float | None
) -> dict[str, Any]:
    found: dict[str, Any] = {"status": str(entry.status)}
    if not entry.within_budget:
        found["within_budget"] = False
    for name in ("reason", "note", "kernels"):
        if words := getattr(entry, name):
            found[name] = words
    if entry.finding is not None:
        found["error"] = float(f"{entry.finding.error:.3g}")
        found["share_of_budget"] = float(f"{entry.finding.share:.3g}")
    median = entry.median
    if median is None:
        return found
    times = [time for round_times in entry.rounds for time in round_times]
    low, _, high = quartiles(times)
    return found | {
        "median_us": _rounded(median),
        "quartiles_us": [_rounded(low), _rounded(high)],
        "rounds_us": [
            _rounded(statistics.median(round_times)) for round_times in entry.rounds
        ],
        "runs": len(times),
        "graph": entry.graph,
        "same_work": entry.same_work,
        "host_us": _rounded(entry.host_us, 1),
        "gb_per_s": _rounded(workload.bytes / median / 1e3, 1),
        "tflop_per_s": _rounded(workload.flops / median / 1e6, 1),
        "share_of_ceiling": _rounded(floor_us / median if floor_us else None, 4),
    }


def _rounded(number: float | None, places: int = 2) -> float | None:
    return None if number is None else round(number, places)
