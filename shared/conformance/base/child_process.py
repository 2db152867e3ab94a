"""A process of the suite that answers in lines on its standard output, on every system.

What the implementation under test, its compilers and torch print must not come between the lines.
So the process keeps its standard output for them, and everything that is printed goes where its
errors go. No file descriptor is inherited besides the three standard ones, which also works on
Windows.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import IO

BEGIN = "the lines of this process begin here"
"""Line before the first one. What an interpreter prints at its start comes before it."""


def start(
    module: str, device: str | None, errors: IO[str] | int, gpu: str | None = None
) -> "subprocess.Popen[str]":
    """Return a process that calls `main` of a module, which gets the function that says a line.

    Args:
        module: Dotted name.
        device: Optional. "cpu" lets Triton interpret kernels. If None, nothing is changed.
        errors: File of what it prints, or subprocess.DEVNULL.
        gpu: Optional. The value of CUDA_VISIBLE_DEVICES. If None, it is as here.
    """
    environment = dict(os.environ)
    # the process finds the same modules, including those of a test's own folder
    environment["PYTHONPATH"] = os.pathsep.join(folder or "." for folder in sys.path)
    if device == "cpu":
        environment.setdefault("TRITON_INTERPRET", "1")
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    return subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import run; run({module!r})"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environment,
        text=True,
    )


def run(module: str) -> None:
    """Call `main` of a module with a function that writes a line to the caller."""
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)

        def say(line: str) -> None:
            lines.write(line + "\n")
            lines.flush()

        say(BEGIN)
        import_module(module).main(say)


def lines_of(said: Iterator[str]) -> Iterator[str]:
    """Yield the complete lines of what a process has said, or is saying."""
    for line in said:
        if line == f"{BEGIN}\n":
            break
    for line in said:
        if line.endswith("\n"):  # otherwise the process ended within it
            yield line
