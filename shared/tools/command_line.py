"""How does a command start, and how does it say what its user can mend?

What all commands share. Nothing here is heavy to import, so that `pagetwin --help` answers at once.
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
    """Have Triton interpret its kernels where no GPU will run them.

    Triton reads the variable once, when it is first imported.
    """
    if device == "cuda":
        return
    import torch

    if device is None and torch.cuda.is_available():
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # an interpreted kernel is many tiny operations: threads cost more than they give
    torch.set_num_threads(1)


@contextmanager
def sentences_for_errors(*others: type[Exception]) -> Iterator[None]:
    """Print what the user can mend as one sentence, and leave with USER_ERROR."""
    mendable: tuple[type[Exception], ...] = (
        ValueError,
        OSError,
        ImportError,
        NotImplementedError,
        *others,
    )
    try:
        yield
    except mendable as error:
        # str of a KeyError is the repr of its message
        sentence = error.args[0] if isinstance(error, KeyError) else error
        console = Console(stderr=True, soft_wrap=True)
        console.print(f"[red]{escape(str(sentence))}[/]", highlight=False)
        raise typer.Exit(USER_ERROR) from None
