"""Arguments of the commands: wrong ones are one sentence, before anything slow is imported.

Bounds of numbers are callbacks of the options, so that all commands judge them alike.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

Value = TypeVar("Value")
UsageError: Any = typer.BadParameter.__base__
"""Of click, or of typer itself, which contains a part of click since 0.27."""
LARGEST_SEED = 2**32 - 1
YEAR = 365 * 24 * 60 * 60.0


class WrongArgument(typer.BadParameter):
    """A wrong argument, whose message names it."""

    def format_message(self) -> str:
        """Return the message alone."""
        return self.message


def number(
    least: float, most: float, above: bool = False
) -> Callable[[typer.CallbackParam, Value], Value]:
    """Return a callback that rejects numbers outside of a range.

    Args:
        least, most: The range.
        above: Whether the number has to be larger than `least`.
    """

    def check(param: typer.CallbackParam, value: Value) -> Value:
        if value is not None:
            check_number(str(param.name), value, least, most, above)
        return value

    return check


def check_number(
    name: str, value: Any, least: float, most: float, above: bool = False
) -> None:
    """Raise if a number is outside of a range; see `number`."""
    if math.isnan(value) or value < least or (above and value == least):
        wanted = f"more than {least:g}" if above else f"at least {least:g}"
    elif value > most:
        wanted = f"at most {most:.12g}"
    else:
        return
    shown = f"{value:g}" if isinstance(value, float) else value
    raise WrongArgument(f"{name} = {shown}: expected {wanted}")


SEED = number(0, LARGEST_SEED)
SECONDS = number(0, YEAR, above=True)
MINUTES = number(0, YEAR / 60, above=True)


def processes(param: typer.CallbackParam, value: int) -> int:
    """Reject a number of processes that this machine cannot run; the callback of an option."""
    from ..conformance.running.gpus import most_workers

    check_number(str(param.name), value, 1, most_workers())
    return value


def split_names(option: str, text: str | None) -> list[str]:
    """Return comma-separated names.

    Raises:
        ValueError: A name is empty, or is given twice.
    """
    if text is None:
        return []
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError(
            f"{option} = {text!r}: expected names that are separated by commas"
        )
    check_different(option, names)
    return names


def check_different(option: str, names: Sequence[str]) -> None:
    """Raise if a name is given twice."""
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ValueError(f"{option} names {name!r} twice: expected it once")


def nearest(name: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    """Return words that name the nearest known names, or nothing without one.

    Args:
        name: A name.
        known: The names that exist.
        cutoff: How similar a name has to be, from 0 to 1.
    """
    found = get_close_matches(name, known, 3, cutoff)
    return f"did you mean {' or '.join(found)}? " if found else ""


def given_options(context: typer.Context) -> set[str]:
    """Return the names of the parameters that the command line contains."""
    return {
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }


def paragraphs(function: Callable[..., None]) -> str:
    """Return the docstring of a command with one line per paragraph, to be wrapped to a width."""
    words = (function.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in words)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Print an error of the command line as one sentence, and exit."""
    try:
        yield
    except UsageError as error:
        from .command_line import USER_ERROR, print_error

        message = error.format_message().strip().replace("\n", " ")
        if not isinstance(error, WrongArgument):
            path = error.ctx.command_path if error.ctx else "pagetwin"
            message = f"{message.rstrip('.')}: `{path} --help` says what is expected"
        print_error(message)
        raise typer.Exit(USER_ERROR) from None


class Command(TyperCommand):
    """A command, which takes no empty argument."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return what is left of the arguments, as typer does."""
        for before, word in zip(["", *args], args, strict=False):
            option, equals, value = word.partition("=")
            if not word:
                option = before if before.startswith("--") else "an argument"
            if not word or (option.startswith("--") and equals and not value):
                raise WrongArgument(f"{option} is empty: expected a value")
        return super().parse_args(ctx, args)


class Commands(TyperGroup):
    """The commands. A wrong command line is one sentence."""

    def make_context(
        self, info_name: Any, args: list[str], *rest: Any, **extra: Any
    ) -> Any:
        """Return the context, as typer does."""
        if not args:
            return super().make_context(info_name, args, *rest, **extra)
        with one_sentence():
            return super().make_context(info_name, args, *rest, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with one_sentence():
            return super().invoke(ctx)
