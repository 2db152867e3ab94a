"""Prints the modules that `pagetwin check` enters on its way from the command line to a law.

    PYTHONPATH=tests python tests/structure/walked_check.py

The way has two parts: the command until it gives the law to its worker process, and that process
until it enters the file of the law. Both run here, and the command starts no process for its laws.
It prints one JSON value: the name and the floor of each module in the order of first calls, and the
floors of callers and functions.
"""

import contextlib
import io
import json
import sys
import threading
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from pagetwin.conformance.api import check as check
from pagetwin.conformance.base.results import Result, Status
from pagetwin.conformance.running import screening as screening
from pagetwin.conformance.running import worker_process
from pagetwin.conformance.running.worker import Job, Worker
from pagetwin.tools.cli import app

LAW = "a gathered sequence is its slots in order"
FOLDERS = ("tools", "conformance")
SHARED = Path(__file__).parents[2] / "shared"


class Walk:
    """The modules that are entered, and the calls between floors, until it is ended."""

    def __init__(self) -> None:
        self.modules: dict[str, str] = {}
        self.calls: set[tuple[str, str, str]] = set()
        self.is_ended = False

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call of a function of the tools or of the suite."""
        place = place_of(frame.f_code.co_filename)
        if event != "call" or self.is_ended or place is None:
            return
        if frame.f_code.co_name == "<module>":
            return
        floor, module = place
        self.modules[module] = floor
        caller = frame.f_back
        while caller is not None and place_of(caller.f_code.co_filename) is None:
            caller = caller.f_back
        before = None if caller is None else place_of(caller.f_code.co_filename)
        if before is not None:
            self.calls.add((before[0], floor, f"{module}.{frame.f_code.co_name}"))
        self.is_ended = floor == "laws"


@cache
def place_of(file: str) -> tuple[str, str] | None:
    """Return the floor and the module of a file, or None if it is elsewhere."""
    path = Path(file)
    if not path.is_relative_to(SHARED):
        return None
    package, *inner = path.relative_to(SHARED).with_suffix("").parts
    if package not in FOLDERS:
        return None
    return (package if package == "tools" else inner[0]), "/".join(inner)


def main() -> None:
    """Print the walk."""
    walk = Walk()

    def try_law(self: Worker, job: Job, area: str) -> Result:
        walk.is_ended |= job.law == LAW
        return Result(job.law, area, Status.HELD, cases=1)

    replaced: Any = Worker
    replaced.start = lambda self: None
    replaced.try_law = try_law
    threading.setprofile(walk.note)
    sys.setprofile(walk.note)
    words = ["check", "reference", "--only", LAW, "--examples", "1", "--device", "cpu"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        app(words)
    jobs = {"implementation": "reference", "device": "cpu"}, {"law": LAW, "examples": 1}
    sys.stdin = io.StringIO("\n".join(map(json.dumps, jobs)))
    walk.is_ended = False
    worker_process.main(lambda line: None)
    sys.setprofile(None)
    print(json.dumps([list(walk.modules.items()), sorted(walk.calls)]))


if __name__ == "__main__":
    main()
