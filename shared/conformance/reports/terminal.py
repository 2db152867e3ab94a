"""A report in a terminal: a table of the laws, the symptoms, and what was noticed besides."""

from collections import Counter
from io import StringIO

from rich.console import Console
from rich.table import Table

from ..base.results import SEVERITIES, Result, Symptom
from .report import Report, heading_of

OUTSIDE = "undeclared"
COLOURS = {
    "held": "green",
    OUTSIDE: "yellow",
    "known failure": "yellow",
    "not finished": "yellow",
}


def print_report(report: Report) -> None:
    """Print the table, what has no verdict, the notes, and each symptom with one program."""
    console, table = Console(), _table(report)
    if not console.is_terminal:
        # a file has no width at which a law's name would have to be wrapped
        console = Console(width=max(80, Console(width=400).measure(table).maximum))
    console.print(table)
    wide = Console(soft_wrap=True)
    _print_undeclared(report, wide)
    _print_unfinished(report, wide)
    print_notes(report, wide)
    for symptom in report.symptoms():
        print_symptom(report, symptom, wide)


def _table(report: Report) -> Table:
    """Return one row per law."""
    table = Table(title=f"{report.implementation} on {report.device}")
    table.add_column("law")
    table.add_column("ended")
    table.add_column("cases", justify="right")
    table.add_column("seconds", justify="right")
    area = ""
    for result in report.results:
        if str(result.status) == OUTSIDE or not _has_begun(result):
            continue
        colour = COLOURS.get(str(result.status), "red")
        if result.area != area:
            area = result.area
            table.add_row(f"[bold]{area.replace('_', ' ')}[/]")
        table.add_row(
            f"  {result.law}",
            f"[{colour}]{result.status}[/]",
            result.count,
            f"{result.seconds:.1f}",
        )
    return table


def _print_undeclared(report: Report, console: Console) -> None:
    """Print why laws are undeclared, and what was found outside of the declared support."""
    reasons = report.why_undeclared()
    if reasons:
        console.print(f"[yellow]undeclared[/]: {sum(reasons.values())} laws")
    for reason, count in reasons.items():
        console.print(f"  {count}: {reason}", highlight=False, markup=False)
    if report.outside:
        console.print("[yellow]outside of the declared support[/]:")
    for how, what in report.outcomes_outside():
        console.print(f"  {how}: {what}", highlight=False, markup=False)


def _print_unfinished(report: Report, console: Console) -> None:
    """Print the laws whose time was over, each with what held until then."""
    if report.unfinished:
        console.print(f"[yellow]not finished[/]: {len(report.unfinished)} laws")
    waiting = [result.reason for result in report.unfinished if not _has_begun(result)]
    for reason, count in Counter(waiting).items():
        console.print(f"  {count}: {reason}", highlight=False, markup=False)
    for result in filter(_has_begun, report.unfinished):
        line = f"  {result.law}: {result.reason}"
        console.print(line, highlight=False, markup=False)
        if result.case:
            console.print(f"    {result.case}", highlight=False, markup=False)


def print_notes(report: Report, console: Console) -> None:
    """Print what was noticed and is not a failure."""
    if report.notes:
        console.print(f"[yellow]notes[/]: {len(report.notes)}")
    for note in report.notes:
        console.print(f"  {note}", highlight=False, markup=False)


def _has_begun(result: Result) -> bool:
    """Return whether a law was tried, or is known without a case."""
    return str(result.status) != "not finished" or bool(result.cases or result.case)


def symptom_text(report: Report) -> str:
    """Return what is printed about the failure of a report with one result."""
    console = Console(file=StringIO(), soft_wrap=True, color_system=None)
    (symptom,) = report.symptoms()
    print_symptom(report, symptom, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.strip()


def print_symptom(report: Report, symptom: Symptom, console: Console) -> None:
    """Print what laws that fail alike have in common, and one program that reproduces it."""
    first = symptom.first
    console.print()
    console.print(symptom.title, style="bold red", highlight=False, markup=False)
    lines = [
        f"law {first.law}",
        SEVERITIES[symptom.severity],
        first.reason,
        first.cause,
        first.message,
    ]
    if first.what:
        lines.append(f"{first.what}, {first.where}")
        lines.append(f"found {first.found}")
        lines.append(f"right {first.right}")
    if picture := first.details.get("picture"):
        lines += [picture["where"], picture["finding"]]
    if first.case:
        lines.append(f"input {first.case}")
    if len(symptom.results) > 1:
        lines += [
            "laws that fail alike:",
            *(f"  {result.law}" for result in symptom.results[1:]),
        ]
    for line in lines:
        if line:
            console.print(f"  {line}", highlight=False, markup=False)
    if first.case:
        console.print("  to reproduce:\n", highlight=False)
        console.print(report.reproducer(first), highlight=False, markup=False)


def print_first_laws(report: Report, console: Console) -> None:
    """Print which laws to look at first, the most severe symptom first."""
    first = report.laws_to_look_at_first()
    console.print(f"[bold]{heading_of(first)}:[/]")
    for index, result in enumerate(first, 1):
        line = f"  {index}. {result.law}: {result.summary}"
        console.print(line, highlight=False, markup=False)
