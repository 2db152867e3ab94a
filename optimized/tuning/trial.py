"""Trials: the cases of a job launched with other tables, checked, and timed in alternation."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ...contract.tuning_classes import TuningCase, TuningClock
from ..dispatch.dispatch import choose_options
from ..kernels.portable.tables.active_tables import trying
from ..kernels.portable.tables.kernel_tables import KernelTables
from ..runtime.attention_call import AttentionCall
from ..runtime.compile_ahead import count_threads, launch_compiled
from ..runtime.workspace import release_workspace

Launch = Callable[[], None]
MakeLaunch = Callable[["PreparedCase"], Launch]
"""Plans the call of a case from the tables that are tried, and returns its launch."""


class Failures:
    """Candidates that were not timed.

    Attributes:
        wrong: those whose results were wrong, in words.
        skipped: number of those that could not be compiled or launched, by error.
    """

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.skipped: Counter[str] = Counter()


class PreparedCase:
    """A case with its tensors.

    Args:
        case: the case.

    Attributes:
        call: the call.
        prefix_len: keys that all sequences begin with; 0 for calls without a shared prefix.
    """

    def __init__(self, case: TuningCase) -> None:
        self.name = case.name
        arguments, self._check = case.make()
        given = dict(arguments)
        self.prefix_len: int = given.get("common_prefix_len", 0)
        options = choose_options(given["options"], causal=True)
        query: Tensor = given["query"]
        scale = given.get("scale")
        self.call = AttentionCall(
            query=query,
            key=given["key_cache"],
            value=given["value_cache"],
            block_table=given["block_table"],
            query_start_loc=given["query_start_loc"],
            lengths=given["seq_lens"],
            max_query_len=given["max_query_len"],
            max_key_len=given["max_seq_len"],
            scale=query.shape[2] ** -0.5 if scale is None else float(scale),
            out=given["out"],
            lse=None,
            options=options,
        )

    def check(self, launch: Launch, clock: TuningClock) -> str:
        """Return what is wrong in the result of a launch; an empty string if nothing is."""
        self.call.out.fill_(math.nan)
        launch()
        clock.wait()
        return self._check(self.call.out)


class Trial:
    """The cases of a job, launched and timed with any tables.

    Args:
        cases: the cases.
        make_launch: how they are launched.
        clock: measures time.
        failures: what could not be timed, modified in place.
    """

    def __init__(
        self,
        cases: Iterable[TuningCase],
        make_launch: MakeLaunch,
        clock: TuningClock,
        failures: Failures,
    ) -> None:
        self.cases = [PreparedCase(case) for case in cases]
        self._make_launch = make_launch
        self._clock = clock
        self._failures = failures
        self._ready: dict[Any, list[Launch]] = {}

    def prepare(self, candidates: Mapping[Any, KernelTables]) -> list[Any]:
        """Compile, launch and check candidates, and return those that can be timed.

        Args:
            candidates: tables by the value that they have.
        """
        new = {
            value: tables
            for value, tables in candidates.items()
            if value not in self._ready
        }
        launches = {value: self._plan(tables) for value, tables in new.items()}
        errors: dict[Any, str] = {}
        for value, made in launches.items():
            if isinstance(made, str):
                errors[value] = made
        planned = {
            value: made for value, made in launches.items() if not isinstance(made, str)
        }
        if planned:
            device = self.cases[0].call.query.device
            compile_all = partial(self._launch_all, planned, errors)
            launch_compiled(compile_all, count_threads(), device)
        # an error of a kernel that ran is an error of the device
        self._clock.wait()
        for value in new:
            if value in errors:
                self._failures.skipped[errors[value]] += 1
            elif message := self._check(planned[value]):
                self._failures.wrong.append(f"{value}: {message}")
                # it may have left its counters of finished splits as they were
                release_workspace()
            else:
                self._ready[value] = [
                    self._clock.prepare(launch) for launch in planned[value]
                ]
        return [value for value in candidates if value in self._ready]

    def race(self, values: Sequence[Any], repeats: int) -> list[dict[Any, float]]:
        """Return the median microseconds of prepared candidates, for each case."""
        found = []
        for index in range(len(self.cases)):
            calls = {value: self._ready[value][index] for value in values}
            times = self._clock.race(calls, repeats)
            found.append(
                {value: statistics.median(runs) for value, runs in times.items()}
            )
        return found

    def forget(self, kept: Sequence[Any]) -> None:
        """Drop all prepared candidates but these, with their graphs."""
        self._ready = {value: self._ready[value] for value in kept}

    def _plan(self, tables: KernelTables) -> list[Launch] | str:
        """Return a launch per case, or the error of one."""
        try:
            with trying(tables):
                return [self._make_launch(case) for case in self.cases]
        except (ValueError, NotImplementedError) as error:
            return type(error).__name__

    def _launch_all(
        self, planned: Mapping[Any, list[Launch]], errors: dict[Any, str]
    ) -> None:
        """Launch all candidates once, and note the errors of those that do not compile or fit."""
        for value, launches in planned.items():
            try:
                for launch in launches:
                    launch()
            except Exception as error:  # of the compiler, of the driver or of triton
                errors[value] = type(error).__name__

    def _check(self, launches: list[Launch]) -> str:
        for case, launch in zip(self.cases, launches, strict=True):
            if message := case.check(launch, self._clock):
                return f"{case.name}: {message}"
        return ""


def compare(
    times: Sequence[Mapping[Any, float]], value: Any, other: Any
) -> tuple[float, float]:
    """Return the ratio of two values' times: the geometric mean over cases, and the largest."""
    ratios = [of_case[value] / of_case[other] for of_case in times]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return mean, max(ratios)
