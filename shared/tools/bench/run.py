"""Benchmark: the loop over rounds and workloads that checks, times and records every library.

A round goes through all workloads. Each workload gets new inputs, every output is checked, and the
libraries that pass are timed in alternation. The record is written after each workload. So a time
limit, Ctrl-C or a crash of the process costs only what was not measured yet.
"""

import json
import random
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import write_text
from .accuracy import Finding, check_write
from .ceilings import Ceilings, measure_ceilings
from .inputs import Inputs
from .libraries import all_libraries, choose_libraries
from .libraries.library import AttentionLibrary, Declined, Prepared
from .libraries.ours import name_tables
from .machine import describe_card, describe_machine
from .results import FORMAT, BenchStatus, Entry, workload_record
from .settings import BenchSettings
from .sparse.accuracy import Expected, find_any_expected
from .sparse.costs import SPARSE_KINDS
from .sparse.inputs import AnyInputs, draw_any_inputs
from .timing import Stopwatch, captured, time_hosts, time_interleaved
from .workloads import Workload, published_figures

METHOD = (
    "the replay of a captured graph between two CUDA events, the L2 cache flushed before each; the"
    " implementations alternate in random order; median and quartiles over all rounds, each with"
    " new inputs; host: the median time until a call returns, measured separately, in random order"
    " too; ratios: the median of the rounds' ratios; floor: bytes at the measured reading rate, or"
    " operations at the measured matrix rate, or an empty graph, whichever is longest"
)
HOST_REPEATS = 15
LARGEST_ERROR = 0.1
"""Relative error of a library that rounds more often above which it is wrong in any case."""
OnMeasured = Callable[[Workload, int, dict[str, Any]], None]


class DeviceLost(RuntimeError):
    """The device no longer works: a kernel accessed invalid memory."""


class Benchmark:
    """One run of the benchmark.

    Args:
        settings: Workloads, device, rounds and libraries.
        libraries: Optional. If None, the libraries that the settings name.
        json_file: Optional. The file that the record is written to after each step.
        on_measured: Optional. Called with each measured workload, its round and its record.
    """

    def __init__(
        self,
        settings: BenchSettings,
        libraries: list[AttentionLibrary] | None = None,
        json_file: Path | None = None,
        on_measured: OnMeasured | None = None,
    ) -> None:
        self.settings = settings
        self.libraries = (
            choose_libraries(
                all_libraries(
                    settings.device, settings.fa3, settings.flashmla, settings.suite
                ),
                list(settings.implementations),
            )
            if libraries is None
            else libraries
        )
        self.json_file, self.on_measured = json_file, on_measured
        self.ended = "began"
        self.ceilings: Ceilings | None = None
        self.machine = describe_machine(settings.device)
        self.machine["tables"] = name_tables(settings.device)
        self.missing = {library.name: library.missing() for library in self.libraries}
        self.entries = {
            workload.name: {library.name: Entry() for library in self.libraries}
            for workload in settings.workloads
        }
        self.seeds: dict[str, list[int]] = {
            workload.name: [] for workload in settings.workloads
        }
        known = None if settings.smoke else published_figures(self.machine["device"])
        self.published = known
        self.seconds = 0.0
        for entries in self.entries.values():
            for name, reason in self.missing.items():
                if reason:
                    entries[name].close(BenchStatus.MISSING, reason)

    def run(self) -> dict[str, Any]:
        """Run all rounds and return the record, which says what ended the run."""
        began = time.monotonic()
        order = random.Random(self.settings.seed)
        stopwatch = Stopwatch(self.settings.device)
        self._write()
        try:
            if self.settings.device == "cuda":
                self.ceilings = self._measure_ceilings(stopwatch)
            self.ended = self._run_rounds(began, order, stopwatch)
        except KeyboardInterrupt:
            self.ended = "interrupted"
        except DeviceLost as error:
            self.ended = str(error)
        self.seconds = time.monotonic() - began
        if self.settings.device == "cuda":
            self.machine["card_after"] = describe_card()
        return self._write()

    @staticmethod
    def _measure_ceilings(stopwatch: Stopwatch) -> Ceilings | None:
        """Return the ceilings, or None without enough free memory."""
        try:
            return measure_ceilings(stopwatch)
        except torch.OutOfMemoryError:
            return None
        finally:
            torch.cuda.empty_cache()

    def _run_rounds(
        self, began: float, order: random.Random, stopwatch: Stopwatch
    ) -> str:
        """Run all workloads in every round, and return how the run ended."""
        limit = self.settings.limit
        for turn in range(self.settings.rounds):
            for workload in self.settings.workloads:
                self.seconds = time.monotonic() - began
                if limit is not None and self.seconds > limit:
                    return f"the limit of {limit:g} s, in round {turn + 1}"
                self.ended = f"stopped in {workload.name}, in round {turn + 1}"
                self._measure(workload, turn, order, stopwatch)
                self.seconds = time.monotonic() - began
                self._write()
                if self.on_measured is not None:
                    self.on_measured(workload, turn, self._workload_record(workload))
        return "complete"

    def _measure(
        self, workload: Workload, turn: int, order: random.Random, stopwatch: Stopwatch
    ) -> None:
        """Check and time every library in one workload, on the inputs of this round."""
        # the inputs do not depend on which other workloads are run
        seed = zlib.crc32(f"{self.settings.seed} {workload.name} {turn}".encode())
        self.seeds[workload.name].append(seed)
        entries = self.entries[workload.name]
        try:
            inputs = draw_any_inputs(workload, seed, self.settings.device)
            expected = None
            if workload.kind != "write":
                expected = find_any_expected(inputs)
        except torch.OutOfMemoryError as error:
            for entry in entries.values():
                if entry.is_open:
                    entry.close(BenchStatus.FAILED, _in_one_line(error))
            return
        calls: dict[str, Callable[[], Any]] = {}
        eager: dict[str, Callable[[], Any]] = {}
        for library in self.libraries:
            entry = entries[library.name]
            if not entry.is_open:
                continue
            if turn == 0:
                # what the record says if this library crashes the process
                self.ended = f"stopped during {library.name} in {workload.name}"
                self._write()
            try:
                found = self._check(library, inputs, expected, entry, stopwatch)
            except Declined as reason:
                entry.close(BenchStatus.DECLINED, str(reason))
            except (
                Exception
            ) as error:  # a library may fail in any way, and the others continue
                entry.close(BenchStatus.FAILED, _in_one_line(error))
                self._check_device(library.name, workload)
            else:
                if found is not None:
                    calls[library.name] = found[0]
                    if stopwatch.on_gpu and entry.host_us is None:
                        eager[library.name] = found[1]
        repeats = self.settings.repeats
        try:
            for name, host_us in time_hosts(eager, HOST_REPEATS, order).items():
                entries[name].host_us = host_us
            times = time_interleaved(calls, repeats, order, stopwatch)
        except RuntimeError as error:
            for name in calls:
                entries[name].close(BenchStatus.FAILED, _in_one_line(error))
            self._check_device(f"one of {', '.join(calls)}", workload)
            return
        for name, own in times.items():
            entries[name].rounds.append(own)
            entries[name].status = BenchStatus.TIMED
        del calls, eager, inputs, expected
        if stopwatch.on_gpu:
            torch.cuda.empty_cache()

    def _check(
        self,
        library: AttentionLibrary,
        inputs: AnyInputs,
        expected: Expected | None,
        entry: Entry,
        stopwatch: Stopwatch,
    ) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
        """Return what is timed and the call itself, or None if its output is wrong.

        On a GPU the output of the captured graph is checked, because that is what is timed.
        """
        prepared = library.prepare_any(inputs)
        entry.note, entry.same_work = prepared.note, prepared.same_work
        call = prepared.call
        if expected is None:
            _poison_cache(inputs)
        if entry.kernels:
            result = call()
        else:
            with library.watch() as entry.kernels:
                result = call()
        stopwatch.wait()
        if stopwatch.on_gpu:
            graph = captured(call)
            entry.graph = graph is not None
            if graph is not None:
                call, result = graph.replay, graph.result
            if expected is None:
                _poison_cache(inputs)
            else:
                _poison(result)
            if graph is None:
                result = call()
            else:
                graph.replay()
            stopwatch.wait()
        found = _find(prepared, result, inputs, expected)
        if entry.finding is None or found.share >= entry.finding.share or not found.ok:
            entry.finding = found
        if not found.ok and not self._is_excused(prepared, inputs.workload, found):
            entry.close(BenchStatus.WRONG, found.message)
            return None
        entry.within_budget &= found.ok
        return call, prepared.call

    @staticmethod
    def _is_excused(prepared: Prepared, workload: Workload, found: Finding) -> bool:
        """Return whether a library is timed although its error exceeds the budget.

        That is a library that rounds more often (`rounds_more`), in a workload with an aim, whose
        table shows the error, a write, or sparse attention. An output that is not finite has no
        error and is wrong.
        """
        is_small = 0 < found.error <= LARGEST_ERROR
        may_round = workload.aim is not None or workload.kind in (
            "write",
            *SPARSE_KINDS,
        )
        return prepared.rounds_more and may_round and is_small

    def _check_device(self, who: str, workload: Workload) -> None:
        """End the run if nothing can be computed any more."""
        if self.settings.device != "cuda":
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise DeviceLost(
                f"the device was lost to {who} in {workload.name}"
                f" ({_in_one_line(error)}): run again without it"
            ) from error

    def record(self) -> dict[str, Any]:
        """Return the results so far, as JSON."""
        settings = self.settings
        return {
            "format": FORMAT,
            "ended": self.ended,
            "complete": self.ended == "complete",
            "smoke": settings.smoke,
            "meaningless": self._why_meaningless(),
            "seconds": round(self.seconds, 1),
            "machine": self.machine,
            "settings": {
                "device": settings.device,
                "suite": settings.suite,
                "workloads": [workload.name for workload in settings.workloads],
                "rounds": settings.rounds,
                "repeats": settings.repeats,
                "seed": settings.seed,
                "limit": settings.limit,
            },
            "method": METHOD,
            "ceilings": None if self.ceilings is None else self.ceilings.to_record(),
            "published": None
            if self.published is None
            else {
                "source": self.published["source"],
                "ceilings": self.published["ceilings"],
            },
            "implementations": {
                library.name: {
                    "title": library.title,
                    "version": library.version(),
                    "missing": self.missing[library.name] or None,
                }
                for library in self.libraries
            },
            "workloads": [
                self._workload_record(workload) for workload in settings.workloads
            ],
        }

    def _why_meaningless(self) -> str | None:
        """Return the label of times that have no meaning, or None if they have one."""
        if not self.settings.smoke:
            return None
        return "interpreter" if self.settings.device == "cpu" else "tiny"

    def _workload_record(self, workload: Workload) -> dict[str, Any]:
        return workload_record(
            workload,
            self.entries[workload.name],
            self.seeds[workload.name],
            self.ceilings,
            self.published,
            meaningless=self.settings.smoke,
        )

    def _write(self) -> dict[str, Any]:
        """Write the record atomically, and return it."""
        record = self.record()
        if self.json_file is not None:
            write_text(self.json_file, json.dumps(record, indent=1) + "\n")
        return record


def _find(
    prepared: Prepared, result: Any, inputs: AnyInputs, expected: Expected | None
) -> Finding:
    if expected is None:
        assert isinstance(inputs, Inputs)
        return check_write(inputs)
    return expected.check(prepared.rows(result), inputs.workload.dtype)


def _poison_cache(inputs: AnyInputs) -> None:
    """Fill the cache of a write with NaN."""
    assert isinstance(inputs, Inputs)
    inputs.poison_cache()


def _poison(result: Tensor) -> None:
    """Fill an output with NaN, or positions with one that no selection has; in place."""
    result.fill_(torch.nan if result.is_floating_point() else -2)


def _in_one_line(error: BaseException) -> str:
    message = str(error).strip().split("\n")[0][:300]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
