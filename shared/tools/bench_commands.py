"""Command `pagetwin bench`: time attention on a GPU."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .command_line import choose_interpreter, sentences_for_errors

if TYPE_CHECKING:
    from .bench.run import Benchmark
    from .bench.settings import BenchSettings

WRONG = 1
INTERRUPTED = 130


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Workloads, or patterns such as 'decode-*'.  (all)"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda, or cpu with --smoke.  (cuda)")
    ] = None,
    implementations: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: ours, fa3, flashinfer, vllm, xformers, torch."
            "  (all that are installed)"
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds, each with new inputs.  (3; smoke 1)")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(help="Runs per implementation and round.  (30; smoke 2)"),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of inputs and of the order of runs.")
    ] = 0,
    limit: Annotated[
        float | None,
        typer.Option(help="Seconds after which no workload is started.  (none)"),
    ] = None,
    fa3: Annotated[
        Path | None,
        typer.Option(
            help="vLLM's _vllm_fa3_C.abi3.so, which holds FlashAttention-3.  ($PAGETWIN_FA3,"
            " or an installed package)"
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write the record to this file, after each workload."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw plots into this .svg or .png file, and a dark version next to it."
        ),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write a page to this file.")
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="Commit that the record names.  (from git)")
    ] = None,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke",
            help="Tiny versions of all workloads; their times have no meaning.",
        ),
    ] = False,
) -> None:
    """Time attention of pagetwin and of other installed libraries, on the same tensors.

    Outputs are checked first. Implementations that fail the check are not timed.

    Exit code 1: ours is wrong or fails in a workload.
    """
    with sentences_for_errors():
        for option, file in (
            ("json", json_file),
            ("plot", plot),
            ("markdown", markdown),
        ):
            if file is not None and not file.parent.is_dir():
                raise FileNotFoundError(
                    f"{option} = {file}: expected a file in a folder that exists"
                )
        if plot is not None:
            from .bench.plot import check_plot_can_be_drawn

            check_plot_can_be_drawn(plot)
        if fa3 is not None and not fa3.is_file():
            raise FileNotFoundError(f"fa3 = {fa3}: expected a file")
        choose_interpreter(device)
        from .bench.run import Benchmark
        from .bench.settings import choose_settings

        settings = choose_settings(
            names or (),
            device=device,
            implementations=[
                name.strip() for name in (implementations or "").split(",") if name
            ],
            rounds=rounds,
            repeats=repeats,
            seed=seed,
            limit=limit,
            smoke=smoke,
            fa3=None if fa3 is None else str(fa3),
        )
        # xFormers uses deprecated block pointers; the interpreter warns about rounding
        warnings.filterwarnings("ignore", "tl.make_block_ptr is deprecated")
        warnings.filterwarnings("ignore", module="triton.runtime.interpreter")
        run = Benchmark(settings, json_file=json_file)
        if commit is not None:
            run.machine["commit"] = commit
    record = _watch(run, settings)
    from .bench.tables import ceiling_words, reasons, result_table
    from .bench.tables import markdown as as_markdown

    console = Console()
    table = result_table(record)
    if not console.is_terminal:
        # a file has no width at which a table would have to be wrapped
        console = Console(width=max(80, Console(width=400).measure(table).maximum))
    console.print(table)
    wide = Console(soft_wrap=True)
    for line in [ceiling_words(record), *reasons(record)]:
        wide.print(line, highlight=False, markup=False)
    if record["published"] is not None:
        source = record["published"]["source"]
        wide.print(f"published: {source}", highlight=False, markup=False)
    with sentences_for_errors():
        if json_file is not None:
            wide.print(f"record: {json_file}", highlight=False, markup=False)
        if markdown is not None:
            markdown.write_text(as_markdown(record), encoding="utf-8")
            wide.print(f"page: {markdown}", highlight=False, markup=False)
        if plot is not None:
            from .bench.plot import write_plots

            for path in write_plots(record, plot):
                wide.print(f"plot: {path}", highlight=False, markup=False)
    _leave(record, console)


def _leave(record: dict[str, Any], console: Console) -> None:
    """Print how the run ended, and exit with the code for it."""
    ended, seconds = record["ended"], record["seconds"]
    faults = [
        each["name"]
        for each in record["workloads"]
        if each["results"]["ours"]["status"] in ("wrong", "failed")
    ]
    colour = "green" if record["complete"] and not faults else "yellow"
    console.print(f"[bold {colour}]{seconds:.0f} s: {ended}.[/]", highlight=False)
    if faults:
        console.print(
            f"[bold red]Ours is wrong or fails in {', '.join(faults)}.[/]",
            highlight=False,
        )
        raise typer.Exit(WRONG)
    if ended == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if "lost" in ended:
        raise typer.Exit(WRONG)


def _watch(run: "Benchmark", settings: "BenchSettings") -> dict[str, Any]:
    """Run a benchmark with a progress bar, and print each workload's first times."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    from .bench.tables import one_line
    from .bench.workloads import Workload

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("workloads"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    lines = Console(soft_wrap=True)
    total = settings.rounds * len(settings.workloads)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling and measuring ceilings", total=total)

        def show(workload: Workload, turn: int, found: dict[str, Any]) -> None:
            words = f"round {turn + 1} of {settings.rounds}: {workload.name}"
            progress.update(task, advance=1, description=words)
            if turn == 0:
                line = one_line(found, run.record()["meaningless"])
                lines.print(line, highlight=False, markup=False)

        run.on_measured = show
        return run.run()
