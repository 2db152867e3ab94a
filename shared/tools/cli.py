"""The command `pagetwin`: replay, reproduce, explain, check, fuzz, export, bench, tune, interpret.

Slow imports are inside the commands, so `pagetwin --help` is fast.
"""

from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console

from .arguments import Command, Commands, paragraphs
from .bench_commands import bench
from .command_line import DISAGREE as DISAGREE
from .command_line import USER_ERROR as USER_ERROR
from .command_line import (
    choose_interpreter,
    interpreter_restorer,
    sentences_for_errors,
)
from .conformance_commands import check
from .fuzz_command import fuzz
from .interpret_command import interpret
from .puzzles.command import puzzles
from .replay_commands import replay, reproduce
from .solution_commands import export
from .tune.command import tune

app = typer.Typer(
    cls=Commands,
    help="Paged attention and its bookkeeping, written twice: to be read and to be fast.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagetwin {version('pagetwin')}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Paged attention and its bookkeeping, written twice: to be read and to be fast."""
    context.call_on_close(interpreter_restorer())


def explain(
    concept: Annotated[
        str | None,
        typer.Argument(
            help="A concept, such as slot-mapping.  (none: list the concepts)",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the worked examples of a concept, or without one the list of concepts.

    Exit codes: 0, printed. 2, the concept does not exist; one sentence says which ones are close.
    """
    if concept is None:
        from .concepts import print_concepts

        print_concepts(Console())
        return
    with sentences_for_errors(KeyError):
        from .concepts import find_concept

        name = find_concept(concept)
        choose_interpreter("cpu")
        from .explain import explain as print_concept

        print_concept(name, Console())


for command in (
    replay,
    reproduce,
    explain,
    check,
    fuzz,
    export,
    bench,
    tune,
    interpret,
    puzzles,
):
    app.command(cls=Command, help=paragraphs(command))(command)
