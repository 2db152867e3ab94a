"""Command `pagetwin bench`: time attention on a GPU."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..contract.extras import is_missing, require
from .arguments import SECONDS, SEED, number, split_names
from .bench_names import check_device, check_names
from .command_line import choose_interpreter, progress_bar, sentences_for_errors
from .files import check_outputs, write_text

if TYPE_CHECKING:
    from .bench.run import Benchmark
    from .bench.settings import BenchSettings

WRONG = 1
INTERRUPTED = 130


Names = Annotated[
    list[str] | None,
    typer.Argument(help="Workloads, or patterns such as 'decode-*'.  (all)"),
]
Device = Annotated[str | None, typer.Option(help="cuda, or cpu with --smoke.  (cuda)")]
Implementations = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated: ours, fa3, fa4, flashmla, flashinfer, cudnn, vllm, xformers,"
        " torch.  (all that are installed)"
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option(
        help="Rounds, each with new inputs.  (3; smoke 1)", callback=number(1, 10**4)
    ),
]
Repeats = Annotated[
    int | None,
    typer.Option(
        help="Runs per implementation and round.  (30; smoke 2)",
        callback=number(1, 10**5),
    ),
]
Seed = Annotated[
    int,
    typer.Option(help="Seed of inputs and of the order of runs.", callback=SEED),
]
Limit = Annotated[
    float | None,
    typer.Option(
        help="Seconds after which no workload is started.  (none)", callback=SECONDS
    ),
]
FlashAttention3 = Annotated[
    Path | None,
    typer.Option(
        help="vLLM's _vllm_fa3_C.abi3.so, which holds FlashAttention-3.  ($PAGETWIN_FA3,"
        " or an installed package)"
    ),
]
FlashMLAFile = Annotated[
    Path | None,
    typer.Option(
        "--flashmla",
        help="vLLM's _flashmla_C.abi3.so, which holds FlashMLA.  ($PAGETWIN_FLASHMLA, or an"
        " installed vLLM)",
    ),
]
Suite = Annotated[
    str,
    typer.Option(
        help="Suite of workloads: standard, extended (each with an aim), formats (caches of"
        " codes), sparse (attention over selected keys, and their selection), all (the first"
        " two)."
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write the record to this file, after each workload."),
]
PlotFile = Annotated[
    Path | None,
    typer.Option(
        help="Draw plots into this .svg or .png file, and a dark version next to it."
    ),
]
MarkdownFile = Annotated[Path | None, typer.Option(help="Write a page to this file.")]
Commit = Annotated[
    str | None, typer.Option(help="Commit that the record names.  (from git)")
]
Smoke = Annotated[
    bool,
    typer.Option(
        "--smoke", help="Tiny versions of all workloads; their times have no meaning."
    ),
]


def bench(
    names: Names = None,
    suite: Suite = "standard",
    device: Device = None,
    implementations: Implementations = None,
    rounds: Rounds = None,
    repeats: Repeats = None,
    seed: Seed = 0,
    limit: Limit = None,
    fa3: FlashAttention3 = None,
    flashmla: FlashMLAFile = None,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
    commit: Commit = None,
    smoke: Smoke = False,
) -> None:
    """Time attention of pagetwin and of other installed libraries, on the same tensors.

    Outputs are checked first. Implementations that fail the check are not timed.

    Exit codes: 0, every workload was timed or the time limit was reached. 1, ours is wrong or
    fails in a workload, or the GPU was lost. 2, the benchmark could not start; one sentence says
    why. 130, it was interrupted.
    """
    with sentences_for_errors():
        _check_files(json_file, plot, markdown, fa3=fa3, flashmla=flashmla)
        if commit is not None and json_file is markdown is None:
            raise ValueError(
                f"commit = {commit!r}: expected --json or --markdown too, which name it"
            )
        libraries = split_names("implementations", implementations)
        files = fa3 is not None, flashmla is not None
        check_names(names or (), suite, libraries, *files)
        check_device(device, smoke)
        if is_missing("triton"):
            from ..engine.triton_versions import why_no_triton

            raise ImportError(why_no_triton())
        choose_interpreter(device)
        from .bench.run import Benchmark
        from .bench.settings import choose_settings

        settings = choose_settings(
            names or (),
            device=device,
            implementations=libraries,
            rounds=rounds,
            repeats=repeats,
            seed=seed,
            limit=limit,
            smoke=smoke,
            fa3=None if fa3 is None else str(fa3),
            flashmla=None if flashmla is None else str(flashmla),
            suite=suite,
        )
        # xFormers uses deprecated block pointers; the interpreter warns about rounding
        warnings.filterwarnings("ignore", "tl.make_block_ptr is deprecated")
        warnings.filterwarnings("ignore", module="triton.runtime.interpreter")
        run = Benchmark(settings, json_file=json_file)
        if commit is not None:
            run.machine["commit"] = commit
    record = _watch(run, settings)
    _print_record(record)
    _write_files(record, json_file, plot, markdown)
    _leave(record)


def _check_files(
    json_file: Path | None,
    plot: Path | None,
    markdown: Path | None,
    **libraries: Path | None,
) -> None:
    """Raise if a file cannot be written or read, before anything is measured."""
    dark = None if plot is None else plot.with_stem(f"{plot.stem}-dark")
    check_outputs(json=json_file, plot=plot, dark_plot=dark, markdown=markdown)
    if plot is not None:
        require("a plot", "matplotlib")
    for name, path in libraries.items():
        if path is not None and not path.is_file():
            raise FileNotFoundError(f"{name} = {path}: expected a file")
        if path is not None and path.suffix != ".so":
            raise ValueError(f"{name} = {path}: expected a file that ends in .so")


def _print_record(record: dict[str, Any]) -> None:
    """Print the table of a record, and what explains it."""
    from .bench.tables import (
        aim_table,
        ceiling_words,
        error_notes,
        reasons,
        result_table,
    )

    console = Console()
    for table in (result_table(record), aim_table(record)):
        if table is None:
            continue
        if not console.is_terminal:
            # a file has no width at which a table would have to be wrapped
            width = Console(width=400).measure(table).maximum
            console = Console(width=max(80, width))
        console.print(table)
    for line in [ceiling_words(record), *error_notes(record), *reasons(record)]:
        _print_line(line)
    _print_line(f"tables of pagetwin: {record['machine']['tables']}")
    if record["published"] is not None:
        _print_line(f"published: {record['published']['source']}")


def _write_files(
    record: dict[str, Any],
    json_file: Path | None,
    plot: Path | None,
    markdown: Path | None,
) -> None:
    """Write the page and the plots, and name all files; the run wrote the record."""
    from .bench.tables import markdown as as_markdown

    with sentences_for_errors():
        if json_file is not None:
            _print_line(f"record: {json_file}")
        if markdown is not None:
            write_text(markdown, as_markdown(record))
            _print_line(f"page: {markdown}")
        if plot is not None:
            from .bench.plot import write_plots

            for path in write_plots(record, plot):
                _print_line(f"plot: {path}")


def _print_line(line: str) -> None:
    Console(soft_wrap=True).print(line, highlight=False, markup=False)


def _leave(record: dict[str, Any]) -> None:
    """Print how the run ended, and exit with the code for it."""
    console = Console(soft_wrap=True)
    ended, seconds = record["ended"], record["seconds"]
    faults = [
        workload["name"]
        for workload in record["workloads"]
        if workload["results"]["ours"]["status"] in ("wrong", "failed")
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

    from .bench.tables import one_line
    from .bench.workloads import Workload

    total = settings.rounds * len(settings.workloads)
    with progress_bar("workloads") as progress:
        task = progress.add_task("compiling and measuring ceilings", total=total)

        def show(workload: Workload, turn: int, found: dict[str, Any]) -> None:
            words = f"round {turn + 1} of {settings.rounds}: {workload.name}"
            progress.update(task, advance=1, description=words)
            if turn == 0:
                line = one_line(found, run.record()["meaningless"])
                _print_line(line)

        run.on_measured = show
        return run.run()
