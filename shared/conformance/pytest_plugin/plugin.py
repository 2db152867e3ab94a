"""Hooks of a run with `--pagetwin`: preflight, collection, processes, and the summaries.

With pytest-xdist, the preflight and the summaries are those of the process that the user started.
Each of its workers has its own process for the laws that it gets, and all end at the same time.
"""

import math
import os
from collections import defaultdict
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ...contract.extras import require
from ...contract.tested_versions import why_untested
from ..base.results import Result, Status
from ..candidates.preflight import check_can_run
from ..reports.report import heading_of
from ..running.gpus import gpus_of_workers
from ..running.law_names import law_names
from ..running.limits import TimeLimits, check_needs_no_gpu
from ..running.worker import SECONDS_OF_A_CASE, SECONDS_OF_A_LAW, Worker
from .items import LawItem, collector_of
from .summary import job_summary
from .tries import Adapter
from .xfails import entries_of, read_entries

KEY = "pagetwin"
"""Name of what xdist's workers and reports of tests carry."""
SUMMARY_FILE = "GITHUB_STEP_SUMMARY"


class LawPlugin:
    """The hooks.

    Args:
        config: The configuration of the run.

    Raises:
        pytest.UsageError: An option has a wrong value.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        given: list[str] = config.getoption("--pagetwin")
        files: list[str] = config.getoption("--pagetwin-xfails")
        seconds: float | None = config.getoption("--pagetwin-seconds")
        if seconds is not None and not 0 < seconds < math.inf:
            raise pytest.UsageError(
                f"--pagetwin-seconds {seconds:g}: expected more than 0"
            )
        try:
            require("pytest --pagetwin", "hypothesis")
            entries = read_entries(files)
        except OSError as error:
            raise pytest.UsageError(f"{error.filename}: {error.strerror}") from None
        except (ImportError, ValueError) as error:
            raise pytest.UsageError(str(error)) from None
        self.limits = TimeLimits(
            SECONDS_OF_A_LAW,
            SECONDS_OF_A_CASE,
            None if seconds is None else seconds / 60,
        )
        self.seconds = seconds
        self.adapters: list[Adapter] = []
        for name in given:
            own, path = _find(config, name)
            if own in (adapter.name for adapter in self.adapters):
                raise pytest.UsageError(f"--pagetwin {name}: it is given twice")
            xfails = entries_of(entries, "xfail", name)
            quarantined = entries_of(entries, "quarantine", name)
            self.adapters.append(Adapter(own, path, xfails, quarantined))
        self.results: defaultdict[str, dict[str, Result]] = defaultdict(dict)
        """The results by adapter and law."""
        self.quarantined: defaultdict[str, dict[str, str]] = defaultdict(dict)
        """The reasons of laws that did not run, by adapter and law."""

    def pytest_report_header(self) -> list[str]:
        """Name the adapters, and versions that were not tested."""
        names = ", ".join(f"{own.name} on {own.device}" for own in self.adapters)
        sentence = why_untested()
        return [f"pagetwin: {names}", *([f"pagetwin: {sentence}"] if sentence else [])]

    # ---- processes

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Find out whether the adapters can run, and start the time of all laws.

        Raises:
            pytest.UsageError: An adapter cannot be imported or cannot run; one sentence says why.
        """
        told: dict[str, Any] | None = getattr(self.config, "workerinput", {}).get(KEY)
        if told is not None:
            self.limits.deadline = told["deadline"]
            for adapter, device, gpu in zip(
                self.adapters, told["devices"], told["gpus"], strict=True
            ):
                adapter.device = device
                adapter.worker = Worker(adapter.name, device, gpu=gpu)
                adapter.worker.deadline = self.limits.deadline
            return
        device = self.config.getoption("--pagetwin-device")
        is_distributed = self.config.pluginmanager.has_plugin("dsession")
        try:
            for adapter in self.adapters:
                adapter.device = check_can_run(adapter.name, device)
                adapter.worker = Worker(adapter.name, adapter.device)
                if adapter.device == "cpu" and not self.config.option.collectonly:
                    check_needs_no_gpu(adapter.worker)
                    if is_distributed or adapter is not self.adapters[0]:
                        adapter.stop()
        except (ImportError, ValueError) as error:
            self._stop()
            raise pytest.UsageError(str(error)) from None
        self.limits.begin()
        for adapter in self.adapters:
            assert adapter.worker is not None
            adapter.worker.deadline = self.limits.deadline

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of pytest-xdist the devices, its GPUs and the time limit."""
        count, number = node.workerinput["workercount"], node.workerinput["workerid"]
        devices = [adapter.device for adapter in self.adapters]
        gpus = [gpus_of_workers(device, count) for device in devices]
        at = int(number.removeprefix("gw")) % count
        node.workerinput[KEY] = {
            "deadline": self.limits.deadline,
            "devices": devices,
            "gpus": [of_workers[at] for of_workers in gpus],
        }

    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> None:
        """End the process of an adapter after its last law."""
        if isinstance(item, LawItem):
            following = nextitem.adapter if isinstance(nextitem, LawItem) else None
            if following is not item.adapter:
                item.adapter.stop()

    def pytest_unconfigure(self) -> None:
        """End all processes."""
        self._stop()

    def _stop(self) -> None:
        for adapter in self.adapters:
            adapter.stop()

    # ---- collection

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Add the adapters to what the session collects.

        An adapter that is an argument of pytest itself, such as `my_adapter.py::a_law`, is
        collected there.
        """
        report = yield
        if isinstance(collector, pytest.Session) and report.passed:
            report.result = [
                *report.result,
                *(
                    collector_of(adapter, collector)
                    for adapter in self.adapters
                    if adapter.path is None or not collector.isinitpath(adapter.path)
                ),
            ]
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(
        self, file_path: Path, parent: pytest.Collector
    ) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
        """Collect the laws of an adapter instead of its tests: pytest does not import it."""
        found = yield
        for adapter in self.adapters:
            if adapter.path == file_path:
                is_given = parent.session.isinitpath(file_path)
                return [collector_of(adapter, parent)] if is_given else []
        return found

    # ---- reports

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the result of a law to the report of its test."""
        report = yield
        if isinstance(item, LawItem) and call.when == "call":
            told: dict[str, Any] = {"adapter": item.adapter.name, "law": item.law}
            if item.result is not None:
                status = item.result.status.value
                told["result"] = asdict(item.result) | {"status": status}
            elif entry := item.adapter.quarantined.get(item.law):
                told["quarantine"] = entry.reason
            setattr(report, KEY, told)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the results, also those of pytest-xdist's workers."""
        told: dict[str, Any] | None = getattr(report, KEY, None)
        if told is None:
            return
        adapter, law = told["adapter"], told["law"]
        if found := told.get("result"):
            status = Status(found["status"])
            self.results[adapter][law] = Result(**found | {"status": status})
        elif reason := told.get("quarantine"):
            self.quarantined[adapter][law] = reason

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run whose time was over before any law was judged, and write the job summary."""
        self._stop()
        if hasattr(self.config, "workerinput"):
            return
        if any(map(self._is_unjudged, self.adapters)) and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if (file := os.environ.get(SUMMARY_FILE)) and self.results:
            text = "\n".join(
                job_summary(
                    adapter.report(*self._in_order(adapter)),
                    self.quarantined.get(adapter.name, {}),
                )
                for adapter in self.adapters
            )
            try:
                with Path(file).open("a", encoding="utf-8") as summary:
                    summary.write(text)
            except OSError as error:
                self.config.issue_config_time_warning(
                    pytest.PytestWarning(f"{SUMMARY_FILE}: {file}: {error.strerror}"), 2
                )

    def pytest_terminal_summary(
        self, terminalreporter: "pytest.TerminalReporter"
    ) -> None:
        """Print the outcomes of each adapter, and the laws to look at first."""
        if hasattr(self.config, "workerinput") or not self.results:
            return
        terminalreporter.section("pagetwin")
        for adapter in self.adapters:
            if not self._in_order(adapter):
                continue
            report = adapter.report(*self._in_order(adapter))
            counts = [f"{count} {name}" for name, count in report.counts().items()]
            if count := len(self.quarantined.get(adapter.name, {})):
                counts.append(f"{count} in quarantine")
            line = f"{adapter.name} on {adapter.device}: {', '.join(counts)}"
            terminalreporter.line(f"{line}.")
            if self._is_unjudged(adapter):
                over = f"--pagetwin-seconds {self.seconds:g} was over"
                terminalreporter.line(f"  {over} before any law was judged", red=True)
            if first := report.laws_to_look_at_first():
                terminalreporter.line(f"{heading_of(first)}:")
                for index, result in enumerate(first, 1):
                    terminalreporter.line(f"  {index}. {result.law}: {result.summary}")

    def _in_order(self, adapter: Adapter) -> list[Result]:
        """Return the results of an adapter in the order of the laws."""
        found = self.results.get(adapter.name, {})
        return [found[law] for _, law in law_names() if law in found]

    def _is_unjudged(self, adapter: Adapter) -> bool:
        """Return whether laws were not finished, and no other law has a verdict."""
        found = self.results.get(adapter.name, {})
        statuses = {result.status for result in found.values()}
        return Status.UNFINISHED in statuses and statuses <= {
            Status.UNFINISHED,
            Status.OUTSIDE,
        }


def _find(config: pytest.Config, name: str) -> tuple[str, Path | None]:
    """Return the name of an adapter for the suite, and its file if it is one.

    A file is relative to the current folder, or else to the root of the tests.
    """
    if not name.endswith(".py"):
        return name, None
    here = config.invocation_params.dir
    path = next(
        (
            folder / name
            for folder in (here, config.rootpath)
            if (folder / name).is_file()
        ),
        here / name,
    )
    path = Path(os.path.normpath(path))
    return os.path.relpath(path) if path.is_relative_to(here) else str(path), path
