"""Shared parts of the commands: choice of the interpreter, and errors as one sentence.

Nothing here is slow to import, so `pagetwin --help` is fast.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from rich.progress import Progress

DISAGREE = 1
USER_ERROR = 2
UNFINISHED = 3
INTERPRETER = "TRITON_INTERPRET"


def choose_interpreter(device: str | None) -> None:
    """Select Triton's interpreter if no GPU will run the kernels.

    Triton reads the variable when a kernel is defined, so when its file is imported for the first
    time. The end of the command restores it, with `interpreter_restorer`.
    """
    if device is not None and device.partition(":")[0] == "cuda":
        return
    import torch

    if device is None and torch.cuda.is_available():
        return
    os.environ.setdefault(INTERPRETER, "1")
    # an interpreted kernel is many tiny operations, for which threads cost more than they gain
    torch.set_num_threads(1)


def interpreter_restorer() -> Callable[[], None]:
    """Return a function that sets TRITON_INTERPRET to what it is now.

    A process may run more than one command, or go on after it. Beside a GPU, kernels that are
    defined later would otherwise be interpreted.
    """
    before = os.environ.get(INTERPRETER)

    def restore() -> None:
        if before is None:
            os.environ.pop(INTERPRETER, None)
        else:
            os.environ[INTERPRETER] = before

    return restore


@contextmanager
def sentences_for_errors(*others: type[Exception]) -> Iterator[None]:
    """Print errors that the user can fix as one sentence, and exit with USER_ERROR."""
    user_errors: tuple[type[Exception], ...] = (
        ValueError,
        OSError,
        ImportError,
        MemoryError,
        NotImplementedError,
        *others,
    )
    try:
        yield
    except user_errors as error:
        print_error(sentence_of(error))
        raise typer.Exit(USER_ERROR) from None


def sentence_of(error: Exception) -> str:
    """Return what an error says, in one line. An error of the system names its file."""
    if isinstance(error, KeyError):
        # str of a KeyError is the repr of its message
        return str(error.args[0])
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'}: {error.strerror}"
    words = str(error) or type(error).__name__
    return f"not enough memory: {words}" if isinstance(error, MemoryError) else words


def print_error(sentence: str, colour: str = "red") -> None:
    """Print a sentence on the error output. Yellow is for a warning."""
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"[{colour}]{escape(sentence)}[/]", highlight=False)


def progress_bar(unit: str, stays: bool = False) -> "Progress":
    """Return a progress bar on the error output.

    Args:
        unit: What it counts, such as "laws".
        stays: Whether it stays on the screen at the end.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    return Progress(*columns, console=Console(stderr=True), transient=not stays)
