"""Reproduction of a case that `pagetwin fuzz` stored: the program is read, and not executed."""

import ast
from pathlib import Path

import typer
from rich.console import Console

from .command_line import DISAGREE, choose_interpreter, sentences_for_errors


def read_case(file: Path) -> tuple[str, str, str, str | None]:
    """Return the implementation, the law, the case and the device of a stored program.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It has no call of `reproduce` with these arguments.
    """
    wrong = f"{file}: expected a program that `pagetwin fuzz` wrote"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: expected a file of `fuzz`")
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
        given = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(wrong) from error
    if not all(isinstance(each, str) for each in (implementation, law, case)):
        raise ValueError(wrong)
    return implementation, law, case, given.get("device")


def reproduce_case(file: Path) -> None:
    """Run a stored case again, and print whether its law holds.

    Args:
        file: A program in the corpus of `pagetwin fuzz`.
    """
    with sentences_for_errors():
        implementation, law, case, device = read_case(file)
        choose_interpreter(device)
        from ..conformance.harness.candidate import load_candidate
        from ..conformance.harness.runner import reproduce as run_again
        from ..conformance.harness.trial import find_law

        find_law(law)
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
