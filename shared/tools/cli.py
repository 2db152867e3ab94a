"""The command `pagetwin`: replay, reproduce, explain, check, fuzz, bench.

Slow imports are inside the commands, so `pagetwin --help` is fast.
"""

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .bench_commands import bench
from .command_line import DISAGREE as DISAGREE
from .command_line import USER_ERROR as USER_ERROR
from .command_line import choose_interpreter, sentences_for_errors
from .conformance_commands import check, fuzz
from .puzzles.command import puzzles

if TYPE_CHECKING:
    from .replay.run import Replay, StepRecord

app = typer.Typer(
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


@app.command()
def replay(
    trace: Annotated[
        str, typer.Option(help="mooncake, azure, or a .csv or .jsonl file.")
    ] = "mooncake",
    requests: Annotated[
        int | None, typer.Option(help="Maximum number of requests.  (40; cuda 100)")
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(help="Factor of all lengths.  (1/64; cuda 1)"),
    ] = None,
    twins: Annotated[
        str,
        typer.Option(
            help="Comma-separated: reference, optimized, triton, xformers, or a package with"
            " the same files."
        ),
    ] = "reference,optimized",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.  (cuda if there is a GPU)")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, float16 or bfloat16.  (float16; cuda bfloat16)"),
    ] = None,
    query_heads: Annotated[
        int | None, typer.Option(help="Query heads of the model.  (4; cuda 32)")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="KV heads of the model.  (2; cuda 8)")
    ] = None,
    head_size: Annotated[
        int | None, typer.Option(help="Elements per head.  (16; cuda 128)")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Attention layers.  (1)")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Slots per block.  (8; cuda 16)")
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            help="Blocks in the cache.  (60 % of the blocks that the trace would use at most)"
        ),
    ] = None,
    token_budget: Annotated[
        int | None,
        typer.Option(help="Maximum number of new tokens per step.  (96; cuda 2048)"),
    ] = None,
    max_running: Annotated[
        int | None,
        typer.Option(help="Maximum number of running requests.  (8; cuda 64)"),
    ] = None,
    steps_per_second: Annotated[
        float | None,
        typer.Option(help="Steps per second of the trace.  (3; cuda 30)"),
    ] = None,
    check_every: Annotated[
        int | None,
        typer.Option(
            help="Interval in steps at which whole caches are compared.  (1; cuda 16)"
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of tokens, tables and block order.")
    ] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a report with plots to this .html file.")
    ] = None,
) -> None:
    """Replay a serving trace through both twins and compare them at every step.

    Defaults are in parentheses, without a GPU and with one.

    Exit code 1: the twins disagree, and a file that reproduces the step has been written.
    """
    with sentences_for_errors():
        if report is not None:
            # before the replay, because a failure afterwards would lose its results
            from .replay.report import check_report_can_be_written

            check_report_can_be_written(report)
        if json_file is not None and not json_file.parent.is_dir():
            raise FileNotFoundError(
                f"json = {json_file}: expected a file in a folder that exists"
            )
        choose_interpreter(device)
        from .replay.run import Replay
        from .replay.settings import choose_settings

        settings = choose_settings(
            device,
            trace=trace,
            requests=requests,
            scale=scale,
            steps_per_second=steps_per_second,
            twins=[name.strip() for name in twins.split(",")],
            dtype=dtype,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_size=head_size,
            layers=layers,
            block_size=block_size,
            num_blocks=num_blocks,
            token_budget=token_budget,
            max_running=max_running,
            check_every=check_every,
            seed=seed,
        )
        run = Replay(settings, folder=Path(), with_holders=report is not None)
    began = time.perf_counter()
    records = _watch(run)
    from .replay.figures import summarize
    from .replay.tables import print_figures

    console = Console()
    figures = summarize(run, records, time.perf_counter() - began)
    print_figures(figures, console)
    with sentences_for_errors():
        if json_file is not None:
            text = json.dumps(figures, indent=2) + "\n"
            json_file.write_text(text, encoding="utf-8")
            console.print(f"figures: {json_file}", highlight=False, markup=False)
        if report is not None:
            from .replay.report import write_report

            write_report(report, figures, records)
            console.print(f"report: {report}", highlight=False, markup=False)
    console.print(
        f"[bold green]The twins agree[/] in all {len(records):,} steps.",
        highlight=False,
    )


@app.command()
def reproduce(
    file: Annotated[Path, typer.Argument(help="The file that a disagreement wrote.")],
) -> None:
    """Run again a step on which the twins disagreed.

    Exit code 1: they still disagree. Exit code 0: they agree.
    """
    with sentences_for_errors():
        from .replay.mismatch import load_step

        stored, before = load_step(file)
        choose_interpreter(stored.device)
        from .replay.reproduce import run_again

        still = run_again(stored, file)
    console = Console(soft_wrap=True)
    console.print(
        f"step {stored.step}, layer {stored.layer}; requests:"
        f" {len(stored.batch.query_lens)}; new tokens: {stored.batch.num_tokens}; twins:"
        f" {', '.join(stored.twins)} on {stored.device}",
        highlight=False,
        markup=False,
    )
    if still is None:
        console.print("[bold green]The step is right now.[/] The stored failure was:")
        console.print(f"{before.law}: {before.found}", highlight=False, markup=False)
        return
    console.print("[bold red]The step is still wrong.[/]")
    console.print(str(still), highlight=False, markup=False)
    raise typer.Exit(DISAGREE)


@app.command()
def explain(
    concept: Annotated[str, typer.Argument(help="A concept, such as slot_mapping.")],
) -> None:
    """Print the worked examples of a concept."""
    with sentences_for_errors(KeyError):
        choose_interpreter("cpu")
        from .explain import explain as print_concept

        print_concept(concept, Console())


app.command()(check)
app.command()(fuzz)
app.command()(bench)
app.command()(puzzles)


def _watch(run: "Replay") -> "list[StepRecord]":
    """Run a replay with a progress bar. A disagreement is printed and ends the command."""
    import torch
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    from .replay.mismatch import TwinMismatch

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    records: list[StepRecord] = []
    try:
        with (
            sentences_for_errors(torch.OutOfMemoryError),
            Progress(*columns, console=Console(stderr=True)) as progress,
        ):
            task = progress.add_task("", total=run.tokens_to_compute)
            for record in run.steps():
                records.append(record)
                progress.update(
                    task,
                    completed=run.tokens_done,
                    description=f"step {record.step}: {record.running} running,"
                    f" {record.waiting} waiting",
                )
    except TwinMismatch as disagreement:
        _print_disagreement(disagreement)
        raise typer.Exit(DISAGREE) from None
    return records


def _print_disagreement(disagreement: Any) -> None:
    console = Console(soft_wrap=True)
    console.print("[bold red]The twins disagree.[/]")
    console.print(str(disagreement), highlight=False, markup=False)
    console.print(
        f"The step is stored. To run it again:\n  pagetwin reproduce {disagreement.path}",
        highlight=False,
        markup=False,
    )
