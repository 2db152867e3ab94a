"""Shared parts of the commands: choice of the interpreter, and errors as one sentence.

Nothing here is slow to import, so `pagetwin --help` is fast.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

DISAGREE = 1
USER_ERROR = 2


def choose_interpreter(device: str | None) -> None:
    """Select Triton's interpreter if no GPU will run the kernels.

    Triton reads the variable once, when it is imported for the first time.
    """
    if device == "cuda":
        return
    import torch

    if device is None and torch.cuda.is_available():
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # an interpreted kernel is many tiny operations, for which threads cost more than they gain
    torch.set_num_threads(1)


@contextmanager
def sentences_for_errors(*others: type[Exception]) -> Iterator[None]:
    """Print errors that the user can fix as one sentence, and exit with USER_ERROR."""
    user_errors: tuple[type[Exception], ...] = (
        ValueError,
        OSError,
        ImportError,
        NotImplementedError,
        *others,
    )
    try:
        yield
    except user_errors as error:
        # str of a KeyError is the repr of its message
        sentence = error.args[0] if isinstance(error, KeyError) else error
        console = Console(stderr=True, soft_wrap=True)
        console.print(f"[red]{escape(str(sentence))}[/]", highlight=False)
        raise typer.Exit(USER_ERROR) from None
