"""Reproduction of cases that `pagetwin check` printed, or that `fuzz` or the recorder stored.

A program is read, and not executed. A case of the recorder is checked by its law.
"""

import ast
from pathlib import Path

import typer
from rich.console import Console

from ..contract.extras import require
from .command_line import DISAGREE, choose_interpreter, sentences_for_errors


def read_case(file: Path) -> tuple[str, str, str, str | None]:
    """Return the implementation, the law, the case and the device of a stored program.

    Raises:
        ValueError: It has no call of `reproduce` with these arguments.
    """
    wrong = f"{file}: expected a program that `pagetwin check` printed"
    wrong += " or `pagetwin fuzz` wrote"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        (call,) = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "reproduce"
        ]
        implementation, law, case = map(ast.literal_eval, call.args)
        given = {
            keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords
        }
    except (SyntaxError, ValueError, TypeError) as error:
        raise ValueError(wrong) from error
    if not all(isinstance(text, str) for text in (implementation, law, case)):
        raise ValueError(wrong)
    return implementation, law, case, given.get("device")


def check_stored(file: Path) -> None:
    """Raise if the file does not exist, or its name has another ending.

    Raises:
        FileNotFoundError, ValueError: The message says which commands write such files.
    """
    expected = (
        "expected a .pt file that `pagetwin replay` or the recorder wrote, or a .py file with the"
        " program that `pagetwin check` printed or `pagetwin fuzz` wrote"
    )
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist: {expected}")
    if not file.is_file():
        raise ValueError(f"{file} is not a file: {expected}")
    if file.suffix not in (".pt", ".py"):
        raise ValueError(f"{file} is not a stored step: {expected}")


def reproduce_case(file: Path) -> None:
    """Run a stored case again, and print whether its law holds.

    Args:
        file: A program that `pagetwin check` printed, or one of the corpus of `pagetwin fuzz`.
    """
    with sentences_for_errors():
        require("pagetwin reproduce of a case of fuzz", "hypothesis")
        implementation, law, case, device = read_case(file)
        choose_interpreter(device)
        from ..conformance.api.check import reproduce as run_again
        from ..conformance.candidates.candidate import load_candidate
        from ..conformance.running.trial import find_law, make_case

        make_case(find_law(law), case)
        load_candidate(implementation)
    console = Console(soft_wrap=True)
    console.print(f"{implementation} on {device}: {law}", highlight=False, markup=False)
    try:
        run_again(implementation, law, case, device)
    except Exception as error:
        console.print("[bold red]The law is still broken.[/]")
        words = f"{type(error).__name__}: {error}"
        console.print(words, highlight=False, markup=False)
        raise typer.Exit(DISAGREE) from None
    console.print("[bold green]The law holds for this case now.[/]")


def reproduce_recorded(file: Path) -> None:
    """Check a stored case again, and print the history of its request.

    Args:
        file: A file that the recorder wrote.
    """
    with sentences_for_errors():
        choose_interpreter(None)
        from ..recorder.case import describe_history
        from ..recorder.reproduce import reproduce_case

        result = reproduce_case(file)
    console = Console(soft_wrap=True)

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    case = result.case
    line(case.sentence)
    line(", ".join(f"{name} {version}" for name, version in case.versions.items()))
    history = describe_history(case)
    if history:
        line("Steps with the blocks of that request:")
        for told in history:
            line(f"  {told}")
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
