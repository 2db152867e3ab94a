"""Sessions of pytest, each in a process forked for it, in which some modules are changed.

A process that has imported torch and both twins, but no instrument, forks one process per session.
It imports the instruments with the changed modules, as do all processes that a test starts
(`overlay/sitecustomize.py`).
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from .digest import ROOT

OVERLAY = Path(__file__).parent / "overlay"
if str(OVERLAY) not in sys.path:
    sys.path.insert(0, str(OVERLAY))

from changed_modules import VARIABLE, install  # noqa: E402

LEFT_OUT = "not slow and not site and not compile and not cuda"
"""Marks of the tests that are run."""
UNCHANGED = ("pagetwin.reference", "pagetwin.optimized")
"""Packages that import none that is changed."""
CHANGED = ("pagetwin.conformance", "pagetwin.recorder")
LONGEST_LINE = 200


@dataclass
class Session:
    """Some tests with some modules changed, and what became of them.

    Args:
        name: What it is about.
        tests: Files of tests, or ids of tests, in the order in which they are run.
        limit: Seconds after which it is ended.
        changed: Optional. The text of each changed module. If None, none is changed.
        traced: Modules whose functions note the tests that call them.
        stops: Whether the first failure ends it.
        failed: The tests that failed, with a line about each.
        seconds_of: The duration of each test that ended, its set-up included.
        calls: The tests that call each function: by module and function.
        running: The test that began last.
        how: "passed", "failed", "crashed" or "timed out".
        seconds: Its whole duration.
    """

    name: str
    tests: Sequence[str]
    limit: float
    changed: dict[str, str] | None = None
    traced: Sequence[str] = ()
    stops: bool = True
    failed: dict[str, str] = field(default_factory=dict)
    seconds_of: dict[str, float] = field(default_factory=dict)
    calls: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    running: str = ""
    how: str = ""
    seconds: float = 0.0


def preload() -> None:
    """Import what is slow to import and is not changed, once for all sessions."""
    import beartype  # noqa: F401
    import hypothesis  # noqa: F401
    import jaxtyping  # noqa: F401
    import numpy  # noqa: F401
    import torch
    import triton  # noqa: F401
    import typer.testing  # noqa: F401

    for name in UNCHANGED:
        import_module(name)
    torch.set_num_threads(1)
    loaded = [name for name in sys.modules if name.startswith(CHANGED)]
    assert not loaded, f"imported before its change: {loaded[0]}"


def run_sessions(sessions: Iterable[Session], workers: int) -> Iterator[Session]:
    """Yield sessions as they end.

    Args:
        sessions: The sessions.
        workers: Sessions at a time.
    """
    waiting, running = deque(sessions), []
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(_Running(waiting.popleft()))
        limit = min(process.deadline for process in running) - time.monotonic()
        wait([process.reports for process in running], timeout=max(0.0, limit))
        for process in list(running):
            if process.has_ended():
                running.remove(process)
                yield process.session


class _Running:
    """A session in its process."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.folder = tempfile.TemporaryDirectory()
        place = Path(self.folder.name)
        changed = {}
        for name, text in (session.changed or {}).items():
            (place / f"{name}.py").write_text(text, encoding="utf-8")
            changed[name] = str(place / f"{name}.py")
        self.noted = place / "calls.txt"
        request = {"changed": changed, "traced": [*session.traced]}
        request["calls"] = str(self.noted)
        (place / "overlay.json").write_text(json.dumps(request), encoding="utf-8")
        self.begin = time.monotonic()
        self.deadline = self.begin + session.limit
        self.reports, theirs = multiprocessing.Pipe(duplex=False)
        self.process = multiprocessing.get_context("fork").Process(
            target=_run_pytest, args=(theirs, session, place)
        )
        self.process.start()
        theirs.close()

    def has_ended(self) -> bool:
        """Read what there is to read, and return whether that was all."""
        session = self.session
        try:
            while self.reports.poll():
                kind, test, value = self.reports.recv()
                if kind == "begins":
                    session.running = test
                elif kind == "failed":
                    session.failed.setdefault(test, value)
                elif kind == "seconds":
                    before = session.seconds_of.get(test, 0.0)
                    session.seconds_of[test] = before + value
                elif kind == "ended":
                    if session.stops and not session.seconds_of and not session.failed:
                        raise RuntimeError(f"{session.name}: no test was run")
                    return self._end("failed" if session.failed else "passed")
        except EOFError:
            return self._end("failed" if session.failed else "crashed")
        if time.monotonic() > self.deadline:
            return self._end("timed out")
        return False

    def _end(self, how: str) -> bool:
        session = self.session
        # the session's process leads a group, with all processes that its tests have started
        for number in (self.process.pid or 0,):
            try:
                os.killpg(number, signal.SIGKILL)
            except ProcessLookupError:
                self.process.kill()
        self.process.join()
        session.how, session.seconds = how, time.monotonic() - self.begin
        if self.noted.exists():
            for line in self.noted.read_text(encoding="utf-8").splitlines():
                test, module, function = line.split("\t")
                tests = session.calls.setdefault((module, function), set())
                if test:
                    tests.add(test.rpartition(" (")[0])
        self.folder.cleanup()
        return True


class _Reporter:
    """A plugin of pytest that reports each test to the process that started the session."""

    def __init__(self, reports: Connection) -> None:
        self.reports = reports

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        """Report that a test begins."""
        self.reports.send(("begins", nodeid, None))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Report how a part of a test ended."""
        self.reports.send(("seconds", report.nodeid, report.duration))
        if report.failed:
            self.reports.send(("failed", report.nodeid, _line_of(report)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Report a file that cannot be read."""
        if report.failed:
            self.reports.send(("failed", report.nodeid, _line_of(report)))


def _line_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return what failed, in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return " ".join(text.split())[:LONGEST_LINE]


def _run_pytest(reports: Connection, session: Session, folder: Path) -> None:
    """Run the tests of a session, in a process of its own."""
    os.setsid()
    os.chdir(ROOT)
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for own, other in ((0, nothing), (1, output), (2, output)):
        os.dup2(other, own)
    os.environ[VARIABLE] = str(folder / "overlay.json")
    # for processes that a test starts without this one's path
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(OVERLAY), *([before] if before else [])]
    )
    install()
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", LEFT_OUT]
    if session.stops:
        arguments.append("-x")
    base = f"--basetemp={folder / 'tests'}"
    pytest.main([*arguments, base, *session.tests], plugins=[_Reporter(reports)])
    reports.send(("ended", "", None))
    # threads and processes that a test has left may wait for ever
    os._exit(0)
