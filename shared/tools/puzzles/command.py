"""Command `pagetwin puzzles`: write the puzzles, or check the answers."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from ...contract.extras import require
from ..command_line import DISAGREE, sentences_for_errors
from ..files import check_folder
from .folder import NAMES, choose, file_of, write

if TYPE_CHECKING:
    from .check import Outcome
    from .puzzle import Puzzle

SHOWN_LINES = 16
"""Lines of a case or an answer that are shown."""


def puzzles(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FOLDER|NAME",
            help="A folder, then names or numbers of puzzles.  (puzzles; all)",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the answers instead.")
    ] = False,
) -> None:
    """Write twelve functions without their bodies, from slot mapping to a Triton kernel.

    With --check: check what you wrote into them. No GPU is needed.

    Exit codes: 0, written, or everything checked is solved; 1, a puzzle is not solved yet; 2, wrong
    arguments.
    """
    with sentences_for_errors():
        if check:
            require("pagetwin puzzles --check", "hypothesis")
        folder, names = choose(words or [])
        missing = [name for name in names if not (folder / file_of(name)).is_file()]
        is_named = len(names) < len(NAMES)
        if check and missing and (is_named or missing == names):
            raise FileNotFoundError(
                f"{folder} has no file {file_of(missing[0])}. This command writes it:"
                f" {_command(folder, missing[0] if is_named else '')}"
            )
        if not check:
            check_folder("folder", folder)
        from .tasks import PUZZLES

        chosen = [puzzle for puzzle in PUZZLES if puzzle.name in names]
        if not check:
            _write(folder, chosen)
            return
        with_file = [puzzle for puzzle in chosen if puzzle.name not in missing]
        is_all_solved = _check(folder, with_file)
    if not is_all_solved:
        raise typer.Exit(DISAGREE)


def _command(folder: Path, name: str = "", check: bool = False) -> str:
    """Return the command that a user types next."""
    return " ".join(
        word
        for word in (
            "pagetwin puzzles",
            "--check" if check else "",
            _as_word(folder),
            name,
        )
        if word
    )


def _as_word(folder: Path) -> str:
    """Return how a command names a folder; a new one with a slash. Empty for the default."""
    if str(folder) in (".", "puzzles"):
        return ""
    is_bare = len(folder.parts) == 1 and not folder.is_dir()
    return f"./{folder}" if is_bare else str(folder)


def _write(folder: Path, chosen: "list[Puzzle]") -> None:
    written = write(folder, chosen)
    console = Console(highlight=False)
    for puzzle in chosen:
        is_new = folder / puzzle.file in written
        note = "" if is_new else "  (there already)"
        console.print(
            f"{puzzle.file:30}{puzzle.title}{note}", markup=False, soft_wrap=True
        )
    first = chosen[0]
    console.print()
    console.print(
        f"Open {folder / first.file}, replace its last line with your answer, then run:",
        markup=False,
        soft_wrap=True,
    )
    command = _command(folder, first.name, check=True)
    console.print(f"  {command}", style="bold", markup=False, soft_wrap=True)


def _check(folder: Path, chosen: "list[Puzzle]") -> bool:
    """Check puzzles and print each outcome. Return whether all are solved."""
    from .check import NOT_STARTED, SOLVED
    from .runner import check_folder

    console = Console(highlight=False)
    results: list[tuple[Puzzle, Outcome]] = []
    for puzzle, outcome in check_folder(folder, chosen):
        results.append((puzzle, outcome))
        style = {SOLVED: "bold green", NOT_STARTED: "dim"}.get(
            outcome.status, "bold red"
        )
        line = Text(f"{puzzle.number:2}  {puzzle.name:24}")
        console.print(line.append(outcome.status, style=style))
        if outcome.status not in (SOLVED, NOT_STARTED):
            _print_wrong(console, outcome)
    solved = sum(outcome.status == SOLVED for _, outcome in results)
    console.print()
    console.print(f"{solved} of {len(results)} solved.", style="bold")
    if solved == len(results):
        twins = " and ".join(_installed(twin) for twin in ("reference", "optimized"))
        console.print(f"Compare your answers with the code in {twins}.", markup=False)
    unsolved = [puzzle for puzzle, outcome in results if outcome.status != SOLVED]
    if unsolved:
        following = unsolved[0]
        console.print(
            f"Next: {folder / following.file}. To read first: {_teacher(following)}",
            markup=False,
            soft_wrap=True,
        )
    return not unsolved


def _installed(twin: str) -> str:
    """Return the folder of a twin, from a checkout or installed."""
    spec = importlib.util.find_spec(f"pagetwin.{twin}")
    assert spec is not None and spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]).resolve())


def _teacher(puzzle: "Puzzle") -> str:
    """Return where the idea of a puzzle is explained."""
    kind, _, name = puzzle.page.partition("/")
    if kind == "concepts":
        return f"pagetwin explain {name}"
    return f"the page {puzzle.page} of the documentation"


def _print_wrong(console: Console, outcome: "Outcome") -> None:
    """Print the counterexample, the first difference and the hint."""
    parts: list[tuple[str, tuple[str, ...], str]] = []
    if outcome.law:
        parts.append(("law", (outcome.law,), ""))
    if outcome.case:
        parts.append(("input", outcome.case, ""))
    if outcome.found:
        parts.append(("yours", outcome.found, "red"))
    if outcome.right:
        parts.append(("right", outcome.right, "green"))
    first = "where" if outcome.found else "error"
    parts.append((first, tuple(outcome.difference.split("\n")), "bold"))
    for name, lines, style in parts:
        shown = list(lines[:SHOWN_LINES])
        if len(lines) > SHOWN_LINES:
            shown.append(f"... {len(lines) - SHOWN_LINES} more lines")
        for number, line in enumerate(shown):
            text = Text(f"{name if not number else '':7}", style="dim")
            _print(console, text.append(line, style=style or "not dim"))
    hint = Text("hint   ", style="dim")
    _print(console, hint.append(outcome.hint_text, style="not dim yellow"))


def _print(console: Console, text: Text) -> None:
    """Print a line indented by 4. A longer one continues under its own beginning."""
    width = max(console.width - 4 - 7, 20)
    head, body = text[:7], text[7:]
    for number, line in enumerate(body.wrap(console, width)):
        line.rstrip()
        start = head if not number else Text(" " * 7)
        console.print(Text("    ") + start + line, soft_wrap=True)
