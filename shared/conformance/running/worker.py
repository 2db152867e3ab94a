"""Worker: a separate process that tries laws, so that a fatal error does not end the caller.

The process reads jobs from its standard input, one line of JSON per job. It says each case before
it is tried, each failure before it is made smaller, and the result of the law. If the process ends
early, the caller therefore knows the input that caused it, and no failure is lost.

A crash, a CUDA error after which no call succeeds, a case that does not end and a failed allocation
are fatal: the process is ended. Unless it was the first call of the process, the law is then tried
on that input alone in a fresh process, which shows whether the input or an earlier one is the
cause. The next law gets a fresh process too. A case that took too long, and does not alone, may
have waited for other processes: its law is judged again, and hangs only if that hangs too.

A law whose time is over has not failed. Its process finishes the case that it tries, and returns
what held until then. If that takes too long, the process is ended.
"""

import json
import math
import os
import queue
import re
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Thread
from typing import IO, Any

from ..base.child_process import lines_of, start
from ..base.results import Result, Status, unfinished
from .gpus import gpus_of_workers

PROCESS = f"{__package__}.worker_process"
"""The module that the process runs."""
SECONDS_OF_A_LAW = 300.0
"""Time limit of a law. No case begins after it, and the law is not finished."""
SIGNATURES = 4
"""Signatures that the drawn cases of a law share on a GPU, where a kernel is compiled for each."""
SECONDS_OF_GRACE = 10.0
"""Time for the case that is tried when the time of its law is over. At most the limit itself."""
SECONDS_OF_A_CASE = 120.0
"""Time limit of a case, compilation included. A case that takes longer hangs."""
SUITE = f"{Path(__file__).parents[1]}{os.sep}"
"""The folder of the suite."""
SIGKILL = 9
"""The signal that ends a process if memory runs out. Windows has no name for it."""
PYTHON = sysconfig.get_path("stdlib")
PACKAGES = {"site-packages", "dist-packages"}
"""Folders in PYTHON whose modules do not belong to it."""
SECONDS_TO_END = 30.0
"""Time in which a process that has closed its side of the pipe ends, also under load."""
NOT_SMALLER = "the time was over before a smaller input was found"
"""Reason of a failure whose input was being made smaller when the time was over."""
FATAL = (Status.CRASHED, Status.HANGS, Status.OUT_OF_MEMORY)
"""Statuses after which the process is ended."""


@dataclass(frozen=True)
class Job:
    """One law to try.

    Args:
        law: Its sentence.
        seed: Seed of the drawn cases.
        examples: Number of drawn cases.
        signatures: Optional. As in `trial.try_law`.
        case: Optional. The only case to try, as Python. If None, cases are drawn or listed.
        listed: Optional. The maximum number of cases of a law that lists them. If None, all of
            them.
        signature: Optional. Seed of a signature. The cases are then its batches with the indices
            `seed` to `seed + examples - 1`. If None, the law draws its cases.
        outside: Whether cases outside of the declared support are tried, instead of those inside.
        probe: Optional. Fields of a `Support` that replaces the declared one, to find out what a
            kernel takes. The case is then neither fitted nor shrunk. If None, nothing is replaced.
        makes_smaller: Whether a failing case is made smaller.
        seconds: Optional. The time limit of the law, which a worker sets. A single case has the
            time limit of cases alone. If None, there is none.
        waits_for_each: As in `screening.screen`.
        is_measured: Whether the case is a workload of a solution, whose errors and latency are
            measured. The case is then neither fitted nor shrunk.
    """

    law: str
    seed: int = 0
    examples: int = 25
    signatures: int | None = None
    case: str | None = None
    listed: int | None = None
    signature: int | None = None
    outside: bool = False
    probe: dict[str, Any] | None = None
    waits_for_each: bool = False
    is_measured: bool = False
    makes_smaller: bool = True
    seconds: float | None = None


def signatures_on(device: str) -> int | None:
    """Return the number of signatures that drawn cases share by default; None for any number."""
    return None if device == "cpu" else SIGNATURES


class Worker:
    """A process that tries laws on one implementation, and is restarted after a crash.

    Args:
        implementation: Argument of `load_candidate`.
        device: The device of the tensors.
        seconds_of_a_law: Time limit of a law.
        seconds_of_a_case: Time limit of a case.
        deadline: Time of `time.monotonic` at which laws end as at their time limit.
        gpu: Optional. The only GPU that the process can use, as CUDA_VISIBLE_DEVICES names it. If
            None, a device with a number selects one, and "cuda" leaves all GPUs visible.
    """

    def __init__(
        self,
        implementation: str,
        device: str,
        seconds_of_a_law: float = SECONDS_OF_A_LAW,
        seconds_of_a_case: float = SECONDS_OF_A_CASE,
        deadline: float = math.inf,
        gpu: str | None = None,
    ) -> None:
        self.deadline = deadline
        self.implementation = implementation
        self.device = device
        self.gpu = gpus_of_workers(device, 1)[0] if gpu is None else gpu
        self.seconds_of_a_law = seconds_of_a_law
        self.seconds_of_a_case = seconds_of_a_case
        self._process: subprocess.Popen[str] | None = None
        self._calls = 0
        """Calls that the process has made before the last case."""
        self._is_ending = False
        """Whether the process has closed its side of the pipe."""
        self.failed_at_once = False
        """Whether the first call of the last law was fatal, also in a fresh process."""
        self.promises: list[str] = []
        """What SUPPORT promises to reject. Known once the process has been started."""
        self.known: dict[str, Result] = {}
        """Results of laws that need no case, by law. Known once the process has been started."""
        self.needs: dict[str, list[str]] = {}
        """The operations that each law needs. Known once the process has been started."""

    def start(self) -> None:
        """Start the process, which imports the implementation.

        Raises:
            ModuleNotFoundError, ImportError, ValueError: The implementation cannot be imported, or
                has none of the operations.
        """
        if self._process is not None:
            return
        # the file is closed in `stop`
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = start(PROCESS, self.device, self._said, self.gpu)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reader = Thread(
            target=_read, args=(self._process.stdout, self._lines), daemon=True
        )
        reader.start()
        self._is_ending = False
        # a single visible GPU has the number 0 in the process
        device = self.device if self.gpu is None else "cuda"
        self._send({"implementation": self.implementation, "device": device})
        found = self._next(time.monotonic() + SECONDS_OF_A_LAW)
        if found is None:
            _, ended = self._ended(SECONDS_OF_A_LAW)
            self.stop()
            raise ImportError(f"{self.implementation} cannot be imported: {ended}")
        if "error" in found:
            self.stop()
            errors = {kind.__name__: kind for kind in (ModuleNotFoundError, ValueError)}
            raise errors.get(found["kind"], ImportError)(found["error"])
        self.promises, self.needs = found["promises"], found["needs"]
        self.known = {
            result["law"]: Result(**result | {"status": Status(result["status"])})
            for result in found["known"]
        }
        self._calls = 0

    def try_law(self, job: Job, area: str) -> Result:
        """Return the result of a law.

        Args:
            job: The law and its cases.
            area: The subject of the law.
        """
        if job.probe is None and job.law in self.known:
            return self.known[job.law]
        if time.monotonic() >= self.deadline:
            reason = "the time was over before its first case"
            return Result(job.law, area, Status.UNFINISHED, reason=reason)
        self.start()
        before = self._calls
        found = self._try(job, area)
        if found.status in FATAL and job.signature is not None and self.device != "cpu":
            found = self._find_batch(job, area, found)
        is_first = found.status in FATAL and self._calls == before
        self.failed_at_once = is_first and not before
        is_single = job.is_measured or job.probe is not None
        is_known = not found.case or is_single
        # the first call of a fresh process was alone already, but may have been slow by chance
        was_alone = self.failed_at_once and found.status != Status.HANGS
        if found.status not in FATAL or is_known or was_alone:
            return found
        alone = self._try(replace(job, case=found.case), area)
        if alone.status == Status.UNFINISHED:
            return found
        seconds = round(found.seconds + alone.seconds, 2)
        if not alone.ok or job.case is not None:
            self.failed_at_once = is_first and alone.status in FATAL
            return replace(alone, cases=found.cases, seconds=seconds)
        if found.status == Status.OUT_OF_MEMORY:
            # memory that earlier laws had left occupied: the law gets a process of its own
            self.stop()
            return self._try(job, area)
        self.failed_at_once = False
        if found.status == Status.HANGS:
            # other processes may have made it slow: a hang would come back
            self.stop()
            again = self._try(job, area)
            seconds = round(seconds + again.seconds, 2)
            if again.status != Status.HANGS:
                note = f"a case took more than {self.seconds_of_a_case:g} seconds, but not when it"
                note += f" was tried again: {found.case}"
                details = again.details | {"note": note}
                return replace(again, seconds=seconds, details=details)
            found = again
        after = "alone, in a fresh process, this input does not fail"
        return replace(found, message=f"{found.message}; {after}", seconds=seconds)

    def _find_batch(self, job: Job, area: str, found: Result) -> Result:
        """Return the fatal error of the same batches if each call is waited for.

        The kernel that has ended the process belongs to any batch of the last group. If the error
        does not recur, the given result is returned, which says so.
        """
        if job.case is not None or job.waits_for_each:
            return found
        again = self._try(replace(job, waits_for_each=True), area)
        if not again.ok:
            return again
        if again.status == Status.UNFINISHED:
            return found
        words = "it does not recur if each call is waited for"
        return replace(found, message=f"{found.message}; {words}")

    def _try(self, job: Job, area: str) -> Result:
        """Return the result of a law. If it is fatal, the process has been ended."""
        self.start()
        began = time.monotonic()
        limit = self.seconds_of_a_law if job.case is None else math.inf
        seconds = max(0.0, min(limit, self.deadline - began))
        end = began + seconds + min(seconds, SECONDS_OF_GRACE)
        self._send(asdict(replace(job, seconds=seconds)))
        case, tried, held, bound = "", 0, 0, SECONDS_OF_A_LAW
        failure: Result | None = None
        while found := self._next(min(end, time.monotonic() + bound)):
            if "result" in found:
                status = Status(found["result"].pop("status"))
                self._calls = found["calls"] if status not in FATAL else self._calls
                if found["is_last"]:
                    self.stop()
                return Result(status=status, **found["result"])
            if "failure" in found:
                status = Status(found["failure"].pop("status"))
                failure = Result(status=status, **found["failure"])
                continue
            case, tried, bound = found["case"], tried + 1, self.seconds_of_a_case
            self._calls, held = found["calls"], found["held"]
        is_late = time.monotonic() >= end
        status, message = self._ended(bound)
        self.stop()
        result = Result(
            job.law,
            area,
            status,
            cases=tried,
            seconds=round(time.monotonic() - began, 2),
            case=case,
            message=message,
        )
        if is_late and status == Status.HANGS:
            if failure is not None:
                return replace(failure, seconds=result.seconds, reason=NOT_SMALLER)
            return unfinished(replace(result, cases=held, message=""), case)
        return result

    def stop(self) -> None:
        """End the process."""
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        process.wait()
        assert process.stdin is not None
        with _ignore_broken_pipe():
            process.stdin.close()
        self._said.close()

    def _send(self, words: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        with _ignore_broken_pipe():
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()

    def _next(self, deadline: float) -> dict[str, Any] | None:
        """Return the next message, or None if the process has ended or the time is over."""
        try:
            line = self._lines.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            return None
        if line is None:
            self._is_ending = True
            return None
        found: dict[str, Any] = json.loads(line)
        return found

    def _ended(self, seconds: float) -> tuple[Status, str]:
        """Return how the process ended, with its last line of output.

        Args:
            seconds: The time limit that is over if the process still runs.
        """
        assert self._process is not None
        try:
            code = self._process.wait(SECONDS_TO_END if self._is_ending else 1)
        except subprocess.TimeoutExpired:
            return Status.HANGS, f"it took more than {seconds:g} seconds"
        if code == -SIGKILL:
            killed = "the process was killed, as the system does if memory runs out"
            return Status.OUT_OF_MEMORY, killed
        self._said.seek(0)
        said = [line for line in self._said.read().splitlines() if line.strip()]
        # the first line of the fault handler names the error; a traceback follows
        fatal = [line for line in said if line.startswith("Fatal Python error")]
        ended = f"the process ended with code {code}"
        last = ": ".join([ended, *(fatal or said)[-1:]])
        return Status.CRASHED, last + (_line_of_kernel(said) if fatal else "")


def _line_of_kernel(traceback: list[str]) -> str:
    """Return the line of the implementation that ended the process, or nothing if none is known.

    Args:
        traceback: The lines of the fault handler, the most recent call first.
    """
    for line in traceback:
        frame = re.fullmatch(r'  File "(.*)", line (\d+) in (\S+)', line)
        if frame is None:
            continue
        file, number, function = frame.groups()
        folders = set(Path(file).parts)
        if file.startswith(SUITE):
            break
        is_of_python = file.startswith(PYTHON) and not folders & PACKAGES
        if not (is_of_python or folders & {"triton", "torch", "numpy"}):
            return f", at line {number} of {Path(file).name}, in {function}"
    return ""


def _read(said: IO[str], lines: "queue.SimpleQueue[str | None]") -> None:
    """Pass the lines of a process on, then None. It runs in a thread until the process ends."""
    with said:
        for line in lines_of(said):
            lines.put(line)
    lines.put(None)


@contextmanager
def _ignore_broken_pipe() -> Iterator[None]:
    """Ignore a broken pipe: the end of the process is detected when its result is read."""
    try:
        yield
    except BrokenPipeError:
        return
