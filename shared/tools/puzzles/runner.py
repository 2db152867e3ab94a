"""Runner: checks puzzles in one worker process with a time limit per puzzle.

If a check crashes or does not end, the process is stopped. The outcome of that puzzle says so, and
a new process continues with the next one.
"""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from .check import WRONG, Outcome, check_file
from .puzzle import Puzzle
from .tasks import PUZZLES

SECONDS_OF_A_PUZZLE = 20.0
"""Time limit of a check. A check of a right solution takes less than 5 seconds."""
SECONDS_TO_START = 120.0


def check_folder(
    folder: Path,
    puzzles: Sequence[Puzzle],
    seconds_of_a_puzzle: float = SECONDS_OF_A_PUZZLE,
) -> Iterator[tuple[Puzzle, Outcome]]:
    """Yield the outcome of each puzzle, as soon as it is known.

    Args:
        folder: Folder with the files of the puzzles.
        puzzles: The puzzles to check. Each of them has a file in the folder.
        seconds_of_a_puzzle: Time limit of the check of one puzzle.
    """
    worker: _Worker | None = None
    try:
        for puzzle in puzzles:
            if worker is None:
                worker = _Worker()
            outcome = worker.check(puzzle, folder / puzzle.file, seconds_of_a_puzzle)
            if outcome is None:
                ended = worker.stop()
                worker = None
                outcome = _ended(ended, seconds_of_a_puzzle)
            yield puzzle, outcome
    finally:
        if worker is not None:
            worker.stop()


def _ended(code: int | None, seconds: float) -> Outcome:
    """Return the outcome of a check that did not return."""
    if code is None:
        return Outcome(
            WRONG,
            "time",
            "A right answer takes less than 5 seconds. Look for a loop that does not end.",
            f"the check took more than {seconds:g} seconds and was stopped",
        )
    return Outcome(
        WRONG,
        "crash",
        "Look for an address outside of a tensor, for recursion without an end, or for a call"
        " of exit().",
        f"the process ended with code {code}",
    )


class _Worker:
    """A process that checks puzzles one after another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(
            target=_serve, args=(theirs,), daemon=True
        )
        self._process.start()
        theirs.close()
        if not self._pipe.poll(SECONDS_TO_START):
            self.stop()
            raise OSError(
                f"the process that checks did not start in {SECONDS_TO_START:g} seconds"
            )
        self._pipe.recv()

    def check(self, puzzle: Puzzle, file: Path, seconds: float) -> Outcome | None:
        """Return the outcome, or None if the process ended or the time is over."""
        self._pipe.send((puzzle.name, str(file)))
        try:
            if not self._pipe.poll(seconds):
                return None
            outcome: Outcome = self._pipe.recv()
        except (EOFError, ConnectionError):
            return None
        return outcome

    def stop(self) -> int | None:
        """End the process. Return its exit code if it had ended by itself, else None."""
        # a process that has crashed closes its pipe first
        if self._pipe.poll(0):
            self._process.join(5)
        code = self._process.exitcode
        self._process.kill()
        self._process.join()
        self._pipe.close()
        return code


def _serve(pipe: Connection) -> None:
    """Check what the pipe names until it is closed."""
    # the kernel of the last puzzle gets CPU tensors; triton reads this when it is imported
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    by_name = {puzzle.name: puzzle for puzzle in PUZZLES}
    pipe.send("ready")
    while True:
        try:
            name, file = pipe.recv()
        except EOFError:
            return
        pipe.send(check_file(by_name[name], Path(file)))
