"""Worker: a separate process that tries laws, so that a crash does not end the caller.

The process reads jobs from its standard input, one line of JSON per job. It writes each case
before it is tried, and the result of the law, to another pipe. If the process ends early, the
caller therefore knows the input that caused it.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from .report import Result, Status

PROCESS = f"{__package__}.worker_process"
"""The module that the process runs."""
SECONDS_OF_A_LAW = 300.0
"""Time limit of a law. A law that takes longer is stopped and reported as crashed."""


@dataclass(frozen=True)
class Job:
    """One law to try.

    Args:
        law: Its sentence.
        seed: Seed of the drawn cases.
        examples: Number of drawn cases.
        case: Optional. The only case to try, as Python. If None, cases are drawn or listed.
        listed: Optional. The maximum number of cases of a law that lists them. If None, all of
            them.
        signature: Optional. Seed of a signature. The cases are then its batches with the indices
            `seed` to `seed + examples - 1`. If None, the law draws its cases.
    """

    law: str
    seed: int = 0
    examples: int = 25
    case: str | None = None
    listed: int | None = None
    signature: int | None = None


class Worker:
    """A process that tries laws on one implementation, and is restarted after a crash.

    Args:
        implementation: Argument of `load_candidate`.
        device: The device of the tensors.
        seconds_of_a_law: Time limit of a law.
    """

    def __init__(
        self,
        implementation: str,
        device: str,
        seconds_of_a_law: float = SECONDS_OF_A_LAW,
    ) -> None:
        self.implementation = implementation
        self.device = device
        self.seconds_of_a_law = seconds_of_a_law
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process, which imports the implementation.

        Raises:
            ModuleNotFoundError, ImportError, ValueError: The implementation cannot be imported, or
                has none of the operations.
        """
        if self._process is not None:
            return
        ours, theirs = os.pipe()
        environment = dict(os.environ)
        # the process finds the same modules, including those of a test's own folder
        environment["PYTHONPATH"] = os.pathsep.join(each or "." for each in sys.path)
        if self.device == "cpu":
            environment.setdefault("TRITON_INTERPRET", "1")
        # the file is closed in `stop`
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {PROCESS} import main; main({theirs})"],
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs],
            env=environment,
            text=True,
        )
        os.close(theirs)
        self._lines = os.fdopen(ours, "rb", buffering=0)
        self._unread = b""
        self._send({"implementation": self.implementation, "device": self.device})
        found = self._next(time.monotonic() + SECONDS_OF_A_LAW)
        if found is None:
            ended = self._ended()
            self.stop()
            raise ImportError(f"{self.implementation} cannot be imported: {ended}")
        if "error" in found:
            self.stop()
            errors = {each.__name__: each for each in (ModuleNotFoundError, ValueError)}
            raise errors.get(found["kind"], ImportError)(found["error"])

    def try_law(self, job: Job, area: str) -> Result:
        """Return the result of a law.

        Args:
            job: The law and its cases.
            area: The subject of the law.
        """
        self.start()
        began = time.monotonic()
        self._send(asdict(job))
        case, tried = "", 0
        while found := self._next(began + self.seconds_of_a_law):
            if "result" in found:
                status = Status(found["result"].pop("status"))
                return Result(status=status, **found["result"])
            case, tried = found["case"], tried + 1
        ended = self._ended()
        self.stop()
        return Result(
            job.law,
            area,
            Status.CRASHED,
            cases=tried,
            seconds=round(time.monotonic() - began, 2),
            case=case,
            message=ended,
        )

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
        self._lines.close()
        self._said.close()

    def _send(self, words: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        with _ignore_broken_pipe():
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()

    def _next(self, deadline: float) -> dict[str, Any] | None:
        """Return the next message, or None if the process has ended or the time is over."""
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._lines], [], [], max(left, 0))
            if not ready:
                return None
            more = self._lines.read(1 << 16)
            if not more:
                return None
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _ended(self) -> str:
        """Return how the process ended, with its last line of output."""
        assert self._process is not None
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return f"it took more than {self.seconds_of_a_law:g} seconds"
        self._said.seek(0)
        said = [line for line in self._said.read().splitlines() if line.strip()]
        # the first line of the fault handler names the error; a traceback follows
        fatal = [line for line in said if line.startswith("Fatal Python error")]
        last = (fatal or said)[-1:]
        return ": ".join([f"the process ended with code {code}", *last])


@contextmanager
def _ignore_broken_pipe() -> Iterator[None]:
    """Ignore a broken pipe: the end of the process is detected when its result is read."""
    try:
        yield
    except BrokenPipeError:
        return
