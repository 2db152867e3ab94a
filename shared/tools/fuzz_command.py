"""Command `pagetwin fuzz`: try new cases on any implementation until the time is over."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..conformance.reports.terminal import print_notes, print_symptom
from ..conformance.running.law_names import check_words
from ..contract.extras import require
from .arguments import MINUTES, number
from .command_line import DISAGREE, choose_interpreter, sentences_for_errors
from .conformance_commands import (
    Device,
    Module,
    Only,
    Workers,
    check_module,
)
from .report_files import HtmlFile, JsonFile, JUnitFile, MarkdownFile, ReportFiles

if TYPE_CHECKING:
    from ..conformance.api.fuzz import Fuzzing
    from ..conformance.base.results import Result


def fuzz(
    module: Module,
    minutes: Annotated[
        float, typer.Option(help="Duration in minutes.", callback=MINUTES)
    ] = 10.0,
    corpus: Annotated[
        Path | None,
        typer.Option(
            "--corpus",
            "--resume",
            help="Folder of what was tried and what failed. A run continues it."
            "  (.pagetwin/fuzz)",
        ),
    ] = None,
    only: Only = None,
    examples: Annotated[
        int,
        typer.Option(help="Drawn cases per law and seed.", callback=number(1, 10**6)),
    ] = 50,
    device: Device = None,
    workers: Workers = 1,
    batches: Annotated[
        int, typer.Option(help="Batches per signature.", callback=number(1, 10**6))
    ] = 256,
    cases: Annotated[
        int | None,
        typer.Option(
            help="End after this number of new cases.  (no limit)",
            callback=number(1, 10**12),
        ),
    ] = None,
    json_file: JsonFile = None,
    markdown: MarkdownFile = None,
    junit: JUnitFile = None,
    html: HtmlFile = None,
) -> None:
    """Try new cases until the time is over, and store what was tried and what failed.

    Most cases are batches that share a signature, so that kernels are compiled once for hundreds of
    them. The next run on the same folder begins with the stored failures and continues with cases
    that have not been tried.

    Exit codes: 0, nothing failed. 1, something failed, and a program for each symptom reproduces
    it. 2, the implementation could not run; one sentence says why.
    """
    with sentences_for_errors():
        require("pagetwin fuzz", "hypothesis")
        files = ReportFiles(json_file, markdown, junit, html)
        files.check()
        check_words(only)
        from ..conformance.api.corpus import CORPUS, Corpus

        Corpus(CORPUS if corpus is None else corpus, module)
        check_module(module, device)
        choose_interpreter(device)
        from ..conformance.api.fuzz import fuzz_implementation

        errors = Console(stderr=True)
        with errors.status("") as status:

            def show(run: "Fuzzing", result: "Result") -> None:
                status.update(
                    f"{run.signatures} signatures, {run.cases:,} cases: {result.law}"
                )

            run = fuzz_implementation(
                module,
                minutes,
                corpus=CORPUS if corpus is None else corpus,
                only=only,
                examples=examples,
                device=device,
                on_result=show,
                workers=workers,
                batches=batches,
                cases=cases,
            )
        assert run.report is not None
        written = files.write(run.report)
    _print(run, written)
    if run.failures:
        raise typer.Exit(DISAGREE)


def _print(run: "Fuzzing", written: list[Path]) -> None:
    """Print what was fixed, what is missing, what failed, and how much was tried."""
    console = Console(soft_wrap=True)
    for law in run.fixed:
        console.print(f"[green]fixed:[/] {law}", highlight=False)
    for law in run.missing:
        console.print(f"[yellow]missing:[/] {law}", highlight=False)
    assert run.report is not None
    for symptom in run.report.symptoms():
        print_symptom(run.report, symptom, console)
    print_notes(run.report, console)
    for path in run.programs:
        console.print(f"to reproduce: python {path}", highlight=False, markup=False)
    for path in written:
        console.print(f"report: {path}", highlight=False, markup=False)
    total = run.summary["cases"]
    all_runs = f"; {total:,} cases in all runs on this corpus"
    before = all_runs if total > run.cases else ""
    rate = run.cases / run.seconds if run.seconds else 0.0
    colour = "red" if run.failures else "green"
    count = len(run.failures)
    console.print(
        f"[bold {colour}]{run.cases:,} cases, {run.signatures} signatures,"
        f" {rate:.1f} cases per second{before}. Failures: {count}.[/]",
        highlight=False,
    )
