"""Reproduction of a case that the recorder stored, and what it tells about the request."""

from pathlib import Path

import typer
from rich.console import Console

from .command_line import DISAGREE, choose_interpreter, sentences_for_errors


def reproduce_recorded(file: Path) -> None:
    """Check a stored case again, and print the history of its request.

    Args:
        file: A file that the recorder wrote.
    """
    with sentences_for_errors():
        choose_interpreter("cpu")
        from ..recorder.case import describe_history
        from ..recorder.reproduce import reproduce_case

        result = reproduce_case(file)
    console = Console(soft_wrap=True)

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    case = result.case
    line(case.sentence)
    line(", ".join(f"{name} {each}" for name, each in case.versions.items()))
    history = describe_history(case)
    if history:
        line("Steps with the blocks of that request:")
        for each in history:
            line(f"  {each}")
    if result.candidate:
        line(result.candidate)
    if result.still is None:
        console.print("[bold green]The stored data violate no law.[/]")
        return
    console.print("[bold red]The stored data violate the law.[/]")
    line(f"{result.still.law}: {result.still.found}")
    if result.candidate_agrees:
        console.print("[bold green]The implementation is right now.[/]")
        return
    raise typer.Exit(DISAGREE)
