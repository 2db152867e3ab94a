"""Command `pagetwin check`: run the laws on any implementation."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..conformance.reports.terminal import print_first_laws, print_report
from ..conformance.running.law_names import check_known, check_words
from ..contract.extras import require
from ..contract.tested_versions import why_untested
from .arguments import (
    MINUTES,
    SECONDS,
    SEED,
    WrongArgument,
    check_different,
    given_options,
    number,
    processes,
)
from .command_line import (
    DISAGREE,
    UNFINISHED,
    choose_interpreter,
    print_error,
    progress_bar,
    sentences_for_errors,
)
from .report_files import HtmlFile, JsonFile, JUnitFile, MarkdownFile, ReportFiles
from .solution_commands import (
    SolutionFile,
    TraceFile,
    choose_implementation,
    print_interpreted,
    write_traces,
)

if TYPE_CHECKING:
    from ..conformance.base.results import Result
    from ..conformance.reports.report import Report

OF_MODULE = (
    "reference, optimized, a package or module with functions named like operations,"
    " or a .py file."
)
Module = Annotated[str, typer.Argument(help=OF_MODULE)]
OptionalModule = Annotated[
    str | None, typer.Argument(help=OF_MODULE, show_default=False)
]
Only = Annotated[
    str | None, typer.Option(help="Words in a law's name or area.  (all laws)")
]
Workers = Annotated[
    int,
    typer.Option(help="Number of processes, at most two per core.", callback=processes),
]
USED_BY_PROBE = {"module", "solution", "device", "probe", "case_seconds", "minutes"}
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, or one GPU such as cuda:1. Several processes on cuda are distributed"
        " over all visible GPUs.  (cuda if there is a GPU)"
    ),
]


def check(
    context: typer.Context,
    module: OptionalModule = None,
    solution: SolutionFile = None,
    trace: TraceFile = None,
    only: Only = None,
    seed: Annotated[int, typer.Option(help="Seed of the cases.", callback=SEED)] = 0,
    examples: Annotated[
        int, typer.Option(help="Drawn cases per law.", callback=number(1, 10**6))
    ] = 25,
    signatures: Annotated[
        int | None,
        typer.Option(
            help="Sets of sizes and options that the drawn cases of a law share; 0 for any number."
            "  (4 on a GPU, any number on a CPU)",
            callback=number(0, 10**6),
        ),
    ] = None,
    device: Device = None,
    json_file: JsonFile = None,
    markdown: MarkdownFile = None,
    junit: JUnitFile = None,
    html: HtmlFile = None,
    known: Annotated[
        list[str] | None,
        typer.Option(
            help="LAW=REASON: a law that is known to be broken, and why. May be repeated."
        ),
    ] = None,
    workers: Workers = 1,
    outside: Annotated[
        bool,
        typer.Option(
            "--outside", help="Try cases outside of SUPPORT too, and report them apart."
        ),
    ] = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Find out what a kernel takes, and print a SUPPORT."
        ),
    ] = False,
    case_seconds: Annotated[
        float,
        typer.Option(
            help="A case that takes longer hangs, and is stopped.", callback=SECONDS
        ),
    ] = 120.0,
    law_seconds: Annotated[
        float | None,
        typer.Option(
            help="A law that takes longer is not finished.  (300, or those of a case)",
            callback=SECONDS,
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Laws that take longer are not finished.  (no limit; 5 with --probe)",
            callback=MINUTES,
        ),
    ] = None,
) -> None:
    """Check an implementation against every law, in a separate process.

    A kernel is called only within its SUPPORT. Laws that fail alike are reported together, with
    one program that reproduces the failure, the most severe failures first. --solution checks a
    solution in the format of FlashInfer-Bench: its definition determines SUPPORT.

    Exit codes: 0, every law holds, is undeclared or is a known failure. 1, a law is broken,
    crashes or misses an operation, or a known failure holds. 2, the implementation could not run;
    one sentence says why. 3, nothing failed, but the time of laws was over before all of their
    cases were tried. The files of a report are written after each law.
    """
    with sentences_for_errors():
        require("pagetwin check", "hypothesis")
        if probe:
            _check_probe(given_options(context))
        files = ReportFiles(json_file, markdown, junit, html, trace)
        files.check()
        known_failures = _reasons_by_law(known or [])
        check_words(only)
        module = choose_implementation(module, solution, trace, device)
        check_module(module, device)
        choose_interpreter(device)
        if probe:
            _print_support(module, device, case_seconds, minutes)
            return
        if law_seconds is None:
            law_seconds = max(300.0, case_seconds)
        report = _watch(
            module,
            only,
            outside,
            files,
            seed=seed,
            examples=examples,
            signatures=signatures,
            device=device,
            known_failures=known_failures,
            workers=workers,
            seconds_of_a_law=law_seconds,
            seconds_of_a_case=case_seconds,
            minutes=minutes,
        )
        if trace is not None:
            write_traces(trace, report, case_seconds)
        written = files.write(report)
    print_report(report)
    console = Console(soft_wrap=True)
    if solution is not None:
        print_interpreted(module, console)
    counts = ", ".join(f"{count} {name}" for name, count in report.counts().items())
    for file in written:
        console.print(f"report: {file}", highlight=False, markup=False)
    colour = "yellow" if report.unfinished else "green"
    colour = colour if report.ok else "red"
    console.print(
        f"[bold {colour}]{module} on {report.device}: {counts}.[/]", highlight=False
    )
    if not report.ok:
        print_first_laws(report, console)
        if solution is None and any(result.raises for result in report.judged):
            print(
                "If the kernel is not meant to take an input that it raises for, declare so:"
                f" pagetwin check {module} --probe"
            )
        raise typer.Exit(DISAGREE)
    if report.unfinished:
        raise typer.Exit(UNFINISHED)


def check_module(module: str, device: str | None) -> None:
    """Raise if the implementation cannot run, before torch or a law is imported here."""
    from ..conformance.candidates.preflight import check_can_run

    if sentence := why_untested():
        print_error(sentence, "yellow")
    check_can_run(module, device)


def _check_probe(given: set[str]) -> None:
    """Raise if an option is given that a probe would ignore."""
    if ignored := sorted(given - USED_BY_PROBE):
        names = " and ".join(f"--{option.removesuffix('_file')}" for option in ignored)
        raise WrongArgument(
            f"--probe tries calls and no laws: expected it without {names.replace('_', '-')}"
        )


def _reasons_by_law(known: list[str]) -> dict[str, str]:
    """Return the reason of each known failure, by law."""
    pairs = []
    for text in known:
        law, equals, reason = text.partition("=")
        if not equals or not reason.strip():
            raise ValueError(f"known = {text!r}: expected LAW=REASON")
        pairs.append((law.strip(), reason.strip()))
    laws = [law for law, _ in pairs]
    check_known(laws)
    check_different("known", laws)
    return dict(pairs)


def _print_support(
    module: str, device: str | None, seconds: float, minutes: float | None
) -> None:
    """Print what a kernel takes, found by trying."""
    from ..conformance.api.check import choose_device
    from ..conformance.api.probe import MINUTES, probe_support

    with Console(stderr=True).status("") as status:
        found = probe_support(
            module, choose_device(device), seconds, status.update, minutes or MINUTES
        )
    # not rich: this is to be pasted
    print(found)


def _watch(
    module: str, only: str | None, outside: bool, files: ReportFiles, **given: Any
) -> "Report":
    """Run all laws with a progress bar, and write the files of the report after each law.

    If the command is interrupted, the report has the laws that were judged until then.
    """
    from ..conformance.api.check import (
        check_implementation,
        choose_device,
        choose_laws,
        report_so_far,
    )

    laws = choose_laws(only)
    judged: dict[str, Result] = {}

    def so_far() -> "Report":
        device = choose_device(given["device"])
        settings = {name: given[name] for name in ("seed", "examples")}
        return report_so_far(module, device, laws, judged, settings)

    with progress_bar("laws") as progress:
        task = progress.add_task("", total=len(laws) * (1 + outside))

        def show(result: "Result") -> None:
            judged.setdefault(result.law, result)
            files.write_so_far(so_far)
            progress.update(task, advance=1, description=result.law)
            if progress.finished:
                progress.update(task, description="searching where NaN comes from")

        try:
            return check_implementation(
                module, only=only, outside=outside, on_result=show, **given
            )
        except KeyboardInterrupt:
            return so_far()
