"""Rates of the cost model: those with which it chooses the launches that took least time.

Every batch is launched once with each query tile of an append, and once as decodes and prefills.
What other rates would have chosen is then known without a launch.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from ...contract.tuning_classes import TuningClock, TuningJob
from ..kernels.portable.host.cost import (
    Rates,
    estimate_append,
    estimate_decode,
    estimate_prefill_of_rows,
)
from ..kernels.portable.host.plans import (
    PortableAppendPlan,
    PortableDecodePlan,
    PortablePrefillPlan,
)
from ..kernels.portable.tables.active_tables import trying
from ..kernels.portable.tables.kernel_tables import KernelTables
from ..kernels.portable.tables.tuned_rows import TunedRow
from ..runtime.attention_call import AttentionCall
from ..runtime.compile_ahead import count_threads, launch_compiled
from ..runtime.cost_layer import BatchBounds, Layer, describe_layer
from ..runtime.family import EVERYTHING, Task
from .search import LARGEST_SHARE, WORST_SHARE
from .trial import Failures, Launch, PreparedCase

PREFILL = 0
"""Instead of the rows of a query tile: decodes and prefills."""
FACTORS = (0.33, 0.5, 0.67, 0.8, 1.25, 1.5, 2.0, 3.0)
"""By what a rate is multiplied in a step."""
REPEATS = 21
STEP = 0.005
"""Decrease of the mean logarithm of times that is worth another rate."""


@dataclass(frozen=True)
class TimedBatch:
    """A batch and the microseconds of its launches.

    Args:
        name: its name in the file.
        layer, bounds: what the estimates know of it.
        row_tiles, prefill_rows: rows of the query tiles of an append, and of a prefill.
        has_decode: whether short requests have a launch of their own.
        times: by the rows of the query tile of an append, and by PREFILL.
    """

    name: str
    layer: Layer
    bounds: BatchBounds
    row_tiles: tuple[int, ...]
    prefill_rows: int
    has_decode: bool
    times: dict[int, float]

    def time_with(self, rates: Rates) -> float:
        """Return the microseconds of what these rates choose."""
        append = estimate_append(self.layer, self.bounds, self.row_tiles, rates)
        others = estimate_prefill_of_rows(
            self.layer, self.bounds, self.prefill_rows, rates
        ).time
        if self.has_decode:
            others += estimate_decode(self.layer, self.bounds).time
        return self.times[append.division if append.time < others else PREFILL]


def tune_rates(
    job: TuningJob, tables: KernelTables, clock: TuningClock, failures: Failures
) -> TunedRow | None:
    """Return the row of the rates. None if a launch could not be timed."""
    batches = []
    for case in job.cases:
        timed = _time_batch(PreparedCase(case), tables, clock, failures)
        if timed is None:
            return None
        batches.append(timed)
    default = tables.rates
    choice = fit_rates(batches, default)
    default_us, choice_us = (
        {batch.name: batch.time_with(rates) for batch in batches}
        for rates in (default, choice)
    )
    return TunedRow("rates", default, choice, default_us, choice_us)


def fit_rates(batches: Sequence[TimedBatch], default: Rates) -> Rates:
    """Return rates that choose faster launches, as few of them changed as possible.

    No batch may become slower than with the default rates by more than WORST_SHARE, which is noise.
    """

    def cost(rates: Rates) -> float:
        times = [
            (batch.time_with(rates), batch.time_with(default)) for batch in batches
        ]
        if any(time > WORST_SHARE * before for time, before in times):
            return math.inf
        return statistics.fmean(math.log(time / before) for time, before in times)

    best, least = default, 0.0
    while True:
        changed = min(_changes(best), key=cost)
        if cost(changed) > least - STEP:
            # another launch may need two rates to be others
            changed = min(chain.from_iterable(map(_changes, _changes(best))), key=cost)
        if cost(changed) > least - STEP:
            break
        best, least = changed, cost(changed)
    return best if math.exp(least) <= LARGEST_SHARE else default


def _changes(rates: Rates) -> Iterator[Rates]:
    """Yield rates one of which is another."""
    for factor in FACTORS:
        for index, flop in enumerate(rates.flop_per_us):
            flops = (*rates.flop_per_us,)
            flops = (*flops[:index], flop * factor, *flops[index + 1 :])
            yield replace(rates, flop_per_us=flops)
        for name in ("split_us", "prefill_us", "prefill_share"):
            changed: dict[str, Any] = {name: getattr(rates, name) * factor}
            yield replace(rates, **changed)


def _time_batch(
    case: PreparedCase, tables: KernelTables, clock: TuningClock, failures: Failures
) -> TimedBatch | None:
    """Return the times of a batch. None if a launch failed, or its result was wrong."""
    call = case.call
    with trying(tables):
        append, prefill = PortableAppendPlan(call), PortablePrefillPlan(call)
        decode = PortableDecodePlan(call) if append.launches.has_decode else None
    launches: dict[int, Launch] = {
        rows: partial(append.launch, call, Task(division=rows))
        for rows in append.row_tiles
    }
    launches[PREFILL] = _in_two(call, decode, prefill)
    try:
        compile_all = partial(_launch_all, tuple(launches.values()))
        launch_compiled(compile_all, count_threads(), call.query.device)
    except Exception as error:  # of the compiler, of the driver or of triton
        failures.skipped[type(error).__name__] += 1
        return None
    finally:
        clock.wait()
    for rows, launch in launches.items():
        if message := case.check(launch, clock):
            name = f"append of {rows} rows" if rows else "prefill"
            failures.wrong.append(f"{name}: {case.name}: {message}")
            return None
    ready = {rows: clock.prepare(launch) for rows, launch in launches.items()}
    times = clock.race(ready, REPEATS)
    return TimedBatch(
        case.name,
        describe_layer(call),
        BatchBounds(
            call.query_start_loc.shape[0] - 1, call.query.shape[0],
            call.max_query_len, call.max_key_len,
        ),
        append.row_tiles,
        prefill.launches.block_m,
        decode is not None,
        {rows: statistics.median(runs) for rows, runs in times.items()},
    )  # fmt: skip


def _in_two(
    call: AttentionCall,
    decode: PortableDecodePlan | None,
    prefill: PortablePrefillPlan,
) -> Callable[[], None]:
    """Return what launches short requests as decodes, and long ones as prefills."""

    def launch() -> None:
        if decode is not None:
            decode.launch(call, EVERYTHING)
        prefill.launch(call, Task(prefill.launches.short_rows))

    return launch


def _launch_all(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch()
