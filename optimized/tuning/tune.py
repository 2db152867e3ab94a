"""Tuning run: measures one choice after the other until the time is over.

Every candidate is compared with the reference on the batches that are timed, before it is timed.
The kernels are those of the portable families alone, also on a chip with kernels of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from ...contract.tuning_classes import (
    TIMED,
    TuningClock,
    TuningJob,
    TuningReport,
)
from ..dispatch.cascade import launch_cascade, make_cascade_plan
from ..dispatch.pipeline import check_supported
from ..kernels.portable.host.launches import Launches
from ..kernels.portable.host.plan import PortablePlan
from ..kernels.portable.host.plans import (
    PortableAppendPlan,
    PortableDecodePlan,
    PortablePrefillPlan,
)
from ..kernels.portable.host.tuning import PROGRAMS, Tiles
from ..kernels.portable.tables.active_tables import cache_file, trying
from ..kernels.portable.tables.kernel_tables import DEFAULT, KernelTables, TileKey
from ..kernels.portable.tables.tuned_rows import Choice, TunedRow, change_tables
from ..kernels.portable.tables.tuning_file import LAYOUT, describe_measured
from ..runtime.attention_call import AttentionCall
from ..runtime.chip import describe_chip
from ..runtime.family import Task
from ..runtime.launcher import check_launch
from .candidates import NumberSpace, Space, TileSpace
from .rates import tune_rates
from .search import Search, confirm
from .trial import Failures, Launch, PreparedCase, Trial

SEARCH_SHARE = 0.75
"""Share of a job's time after which its search ends; the rest is for the last race."""
RATES = "rates"
OnProgress = Callable[[int, str], None]
"""Called with the number of jobs that are done, and what is measured now."""


def tune_kernels(
    jobs: Sequence[TuningJob],
    clock: TuningClock,
    seconds: float,
    device: torch.device | str = "cuda",
    is_exhaustive: bool = False,
    on_progress: OnProgress = lambda done, words: None,
) -> TuningReport:
    """Measure choices of the portable kernels, and return them as a tuning file's contents.

    Nothing is loaded: `load_tuning` reads the file. No other thread may use the device.

    Args:
        jobs: the choices, in the order in which they are measured.
        clock: measures time.
        seconds: limit. What is compiled or timed then is finished, and no other job begins.
        device: the device of the jobs' tensors.
        is_exhaustive: whether all candidates are timed, instead of those next to the best one.
        on_progress: called before each job, and while it is measured.

    Raises:
        ValueError: a job is of no known kind, or its tensors are not on a GPU while the interpreter
            is off.
        NotImplementedError: a layer that the kernels do not take on this device.
    """
    for job in jobs:
        if job.what not in (*TIMED, RATES):
            known = ", ".join((*TIMED, RATES))
            raise ValueError(f"what = {job.what!r}: expected one of {known}")
    run = _Run(clock, clock.now() + seconds, torch.device(device), is_exhaustive)
    ended = "complete"
    try:
        for done, job in enumerate(jobs):
            if clock.now() >= run.end:
                ended = f"the time was over after {done} of {len(jobs)} choices"
                break
            run.on_words = partial(on_progress, done)
            run.measure(job, len(jobs) - done)
    except KeyboardInterrupt:
        ended = "interrupted"
    except LostDevice as error:
        ended = str(error)
    return run.report(ended)


class LostDevice(RuntimeError):
    """A candidate accessed invalid memory, and the device cannot be used any more."""


class _Run:
    """The state of a run.

    Args:
        clock: measures time.
        end: the moment at which the time is over.
        device: the device.
        is_exhaustive: whether all candidates are timed.
    """

    def __init__(
        self, clock: TuningClock, end: float, device: torch.device, is_exhaustive: bool
    ) -> None:
        self.clock, self.end, self.device = clock, end, device
        self.is_exhaustive = is_exhaustive
        self.tables = DEFAULT
        self.rows: list[TunedRow] = []
        self.failures = Failures()
        self.tried = 0
        self.on_words: Callable[[str], None] = lambda words: None

    def measure(self, job: TuningJob, jobs_left: int) -> None:
        """Measure one job, and add its row. It has an even share of the time that is left."""
        now = self.clock.now()
        job_end = now + (self.end - now) / jobs_left
        try:
            self.on_words(job.what)
            if job.what == RATES:
                row = tune_rates(job, self.tables, self.clock, self.failures)
            else:
                row = self._search(job, now, job_end)
        except torch.OutOfMemoryError as error:
            # of a batch that another process left no memory for
            self.failures.skipped[type(error).__name__] += 1
            return
        except RuntimeError as error:
            self._raise_if_lost(job, error)
            raise
        if row is not None:
            self.rows.append(row)
            self.tables = row.change(self.tables)

    def _raise_if_lost(self, job: TuningJob, error: RuntimeError) -> None:
        try:
            self.clock.wait()
        except RuntimeError:
            words = str(error).strip().split("\n")[0][:200]
            raise LostDevice(
                f"the device was lost to a candidate of {job.what} ({words})"
            ) from error

    def _search(self, job: TuningJob, begin: float, end: float) -> TunedRow | None:
        """Return the row of a job. None if it has no tiles, or its default cannot be timed.

        Args:
            begin, end: of the job's time, in seconds.
        """
        search_end = begin + SEARCH_SHARE * (end - begin)
        make_launch = partial(_make_launch, job)
        trial = Trial(job.cases, make_launch, self.clock, self.failures)
        call = trial.cases[0].call
        check_launch(call.query)
        check_supported(call.query, call.value)
        with trying(self.tables):
            launches = _make_plan(job, call).launches
        found = _find_choice(job, launches, self.device)
        if found is None or any(row.key == found[0] for row in self.rows):
            return None
        key, default, space = found
        apply = partial(change_tables, self.tables, key)
        self.on_words(TunedRow(key, default, default).name)
        if not trial.prepare({default: self.tables}):
            return None
        search = Search(
            trial=trial,
            space=space,
            default=default,
            apply=apply,
            is_over=lambda: self.clock.now() >= search_end,
            is_exhaustive=self.is_exhaustive,
            on_candidate=self._count,
        )
        choice = search.run()
        if choice != default and not self._is_proved(job, apply(choice), choice):
            choice = default
        chosen = confirm(trial, default, choice, lambda: self.clock.now() >= end)
        return TunedRow(
            key, default, chosen.choice, chosen.default_us, chosen.choice_us
        )

    def _count(self, candidates: int) -> None:
        self.tried += candidates

    def _is_proved(self, job: TuningJob, tables: KernelTables, choice: Choice) -> bool:
        """Return whether the results of a choice are right in the batches that are not timed."""
        make_launch = partial(_make_launch, job)
        for case in map(PreparedCase, job.proofs):
            with trying(tables):
                launch = make_launch(case)
            if message := case.check(launch, self.clock):
                self.failures.wrong.append(f"{choice}: {case.name}: {message}")
                return False
        return True

    def report(self, ended: str) -> TuningReport:
        """Return what was found so far."""
        record = {
            "layout": LAYOUT,
            **describe_measured(self.device),
            "torch": torch.__version__,
            "ended": ended,
            "tried": self.tried,
            "skipped": dict(self.failures.skipped),
            "wrong": self.failures.wrong,
            "rows": [row.to_record() for row in self.rows],
        }
        return TuningReport(
            record=record,
            path=cache_file(describe_chip(self.device)),
            ended=ended,
            wrong=tuple(self.failures.wrong),
            skipped=self.failures.skipped.total(),
            tried=self.tried,
        )


def _make_plan(job: TuningJob, call: AttentionCall) -> PortablePlan:
    """Return the plan of the kernel that a job is about."""
    if job.what == "append":
        return PortableAppendPlan(call)
    if job.what == "prefill":
        return PortablePrefillPlan(call)
    return PortableDecodePlan(call)


def _make_launch(job: TuningJob, case: PreparedCase) -> Launch:
    """Return a launch of that kernel; with a shared prefix, those of a cascade."""
    call = case.call
    if case.prefix_len:
        return partial(launch_cascade, make_cascade_plan(call), call, case.prefix_len)
    plan: Any = _make_plan(job, call)
    task = Task(plan.launches.short_rows if job.what == "prefill" else 0, job.rows)
    return partial(plan.launch, call, task)


def _find_choice(
    job: TuningJob, launches: Launches, device: torch.device
) -> tuple[TileKey | str, Any, Space] | None:
    """Return the key of a job's choice, the default and all values; None if it has none."""
    thresholds = DEFAULT.thresholds
    if job.what in (field.name for field in fields(thresholds)):
        number: float = getattr(thresholds, job.what)
        return job.what, number, NumberSpace(number)
    key = launches.tile_key
    if job.what == "prefill":
        return _of_tiles(key, launches.prefill_tiles, 0, device)
    if job.what == "append":
        tiles = next(
            (tiles for tiles in launches.row_tiles[1:] if tiles.block_m == job.rows),
            None,
        )
        if tiles is None:
            return None
        programs = PROGRAMS if tiles.num_warps <= 4 else 1
        return _of_tiles(
            key._replace(role=job.what, rows=job.rows), tiles, programs, device
        )
    if not launches.has_decode:
        return None
    is_small = job.what == "small batch"
    tiles = launches.small_batch_tiles if is_small else launches.decode_tiles
    key = key._replace(role=job.what, rows=launches.short_rows)
    return _of_tiles(key, tiles, 1 if is_small else PROGRAMS, device)


def _of_tiles(
    key: TileKey, tiles: Tiles, programs: int, device: torch.device
) -> tuple[TileKey, Tiles, Space]:
    shared_memory = describe_chip(device).shared_memory
    return key, tiles, TileSpace(key, tiles, programs, shared_memory)
