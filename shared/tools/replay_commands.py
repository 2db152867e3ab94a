"""Commands `pagetwin replay` and `pagetwin reproduce`."""

import json
import time
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..contract.extras import require
from .arguments import SEED, number, processes, split_names
from .command_line import (
    DISAGREE,
    choose_interpreter,
    progress_bar,
    sentences_for_errors,
)
from .files import check_outputs, write_text

if TYPE_CHECKING:
    from .replay.mismatch import TwinMismatch
    from .replay.run import Replay, StepRecord

Trace = Annotated[str, typer.Option(help="mooncake, azure, or a .csv or .jsonl file.")]
Requests = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of requests.  (40; cuda 100)", callback=number(1, 10**6)
    ),
]
Scale = Annotated[
    float | None,
    typer.Option(
        help="Factor of prompt lengths.  (1/64; cuda 1)", callback=number(0, 1.0, True)
    ),
]
OutputScale = Annotated[
    float | None,
    typer.Option(
        help="Factor of output lengths.  (1/32; cuda 1)", callback=number(0, 1.0, True)
    ),
]
Twins = Annotated[
    str,
    typer.Option(
        help="Comma-separated: reference, optimized, triton, xformers, or a package with"
        " the same files."
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda.  (cuda if there is a GPU)")
]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, float16 or bfloat16.  (float16; cuda bfloat16)"),
]
QueryHeads = Annotated[
    int | None,
    typer.Option(
        help="Query heads of the model.  (4; cuda 32)", callback=number(1, 1024)
    ),
]
KVHeads = Annotated[
    int | None,
    typer.Option(help="KV heads of the model.  (2; cuda 8)", callback=number(1, 1024)),
]
HeadSize = Annotated[
    int | None,
    typer.Option(help="Elements per head.  (16; cuda 128)", callback=number(1, 1024)),
]
Layers = Annotated[
    int | None, typer.Option(help="Attention layers.  (1)", callback=number(1, 1024))
]
BlockSize = Annotated[
    int | None,
    typer.Option(help="Slots per block.  (8; cuda 16)", callback=number(1, 2**16)),
]
NumBlocks = Annotated[
    int | None,
    typer.Option(
        help="Blocks in the cache.  (60 % of the blocks that the trace would use at most)",
        callback=number(1, 2**31 - 1),
    ),
]
TokenBudget = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of new tokens per step.  (96; cuda 2048)",
        callback=number(1, 10**6),
    ),
]
MaxRunning = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of running requests.  (16; cuda 64)",
        callback=number(1, 10**6),
    ),
]
StepsPerSecond = Annotated[
    float | None,
    typer.Option(
        help="Steps per second of the trace.  (3; cuda 30)",
        callback=number(0, 1e6, True),
    ),
]
CheckEvery = Annotated[
    int | None,
    typer.Option(
        help="Interval in steps at which whole caches are compared.  (1; cuda 16)",
        callback=number(1, 10**9),
    ),
]
All = Annotated[
    bool,
    typer.Option(
        "--all",
        help="Compute attention in every step. Interpreted, one step in six computes it.",
    ),
]
Ranks = Annotated[
    int,
    typer.Option(
        help="Processes that share each sequence's keys, at most two per core; each twin runs on"
        " 1 and on these.",
        callback=processes,
    ),
]
Splits = Annotated[
    int,
    typer.Option(
        help="Fixed splits of the keys, for the bits of one rank. 0: none.",
        callback=number(0, 1024),
    ),
]
Seed = Annotated[
    int, typer.Option(help="Seed of tokens, tables and block order.", callback=SEED)
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write all figures to this file.")
]
ReportFile = Annotated[
    Path | None, typer.Option(help="Write a report with plots to this .html file.")
]


def replay(
    trace: Trace = "mooncake",
    requests: Requests = None,
    scale: Scale = None,
    output_scale: OutputScale = None,
    twins: Twins = "reference,optimized",
    device: Device = None,
    dtype: Dtype = None,
    query_heads: QueryHeads = None,
    kv_heads: KVHeads = None,
    head_size: HeadSize = None,
    layers: Layers = None,
    block_size: BlockSize = None,
    num_blocks: NumBlocks = None,
    token_budget: TokenBudget = None,
    max_running: MaxRunning = None,
    steps_per_second: StepsPerSecond = None,
    check_every: CheckEvery = None,
    all_steps: All = False,
    ranks: Ranks = 1,
    splits: Splits = 0,
    seed: Seed = 0,
    json_file: JsonFile = None,
    report: ReportFile = None,
) -> None:
    """Replay a serving trace through both twins and compare them step by step.

    Each twin is also compared with the reference in float64. Defaults are in parentheses, without
    a GPU and with one. Lengths are scaled down without a GPU; a table says by how much.

    Exit codes: 0, no step differs. 1, a step differs, and a file that reproduces it has been
    written. 2, the replay could not run; one sentence says why.
    """
    given: dict[str, Any] = {
        "trace": trace,
        "requests": requests,
        "scale": scale,
        "output_scale": output_scale,
        "twins": twins.split(","),
        "dtype": dtype,
        "query_heads": query_heads,
        "kv_heads": kv_heads,
        "head_size": head_size,
        "layers": layers,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "token_budget": token_budget,
        "max_running": max_running,
        "steps_per_second": steps_per_second,
        "check_every": check_every,
        "attention_every": 1 if all_steps else None,
        "ranks": ranks,
        "splits": splits,
        "seed": seed,
    }
    with sentences_for_errors():
        # before the replay, because a failure afterwards would lose its results
        check_outputs(json=json_file, report=report)
        if report is not None:
            require("a report", "jinja2", "matplotlib")
        given["twins"] = split_names("twins", twins)
        from .replay.settings import check_settings

        check_settings(device, **given)
        choose_interpreter(device)
        from ..recorder import recorder_from_environment
        from .replay.run import Replay
        from .replay.settings import choose_settings

        settings = choose_settings(device, **given)
        run = Replay(
            settings,
            folder=Path(),
            with_holders=report is not None,
            recorder=recorder_from_environment(),
        )
    began = time.perf_counter()
    records = _watch(run)
    _print_results(run, records, time.perf_counter() - began, json_file, report)


def reproduce(
    file: Annotated[
        Path,
        typer.Argument(
            help="A .pt file that `replay` or the recorder wrote, or a .py file with the"
            " program that `check` printed or `fuzz` wrote."
        ),
    ],
) -> None:
    """Run again a step on which the twins disagreed, or a case that broke a law.

    A case of the recorder is checked by the law that it violated, without the engine.

    Exit codes: 0, the twins agree now, or the law holds. 1, it still fails. 2, it could not run;
    one sentence says why.
    """
    from .reproduce_case import check_stored, reproduce_case, reproduce_recorded

    with sentences_for_errors():
        check_stored(file)
    if file.suffix == ".py":
        reproduce_case(file)
        return
    if file.name.startswith("pagetwin-record"):
        reproduce_recorded(file)
        return
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


def _watch(run: "Replay") -> "list[StepRecord]":
    """Run a replay with a progress bar. A disagreement is printed and ends the command."""
    import torch

    from .replay.mismatch import TwinMismatch

    records: list[StepRecord] = []
    try:
        with sentences_for_errors(torch.OutOfMemoryError), ExitStack() as bar:
            steps = run.steps()
            # what a twin does not take is raised by the first step, and needs no bar
            first = next(steps)
            progress = bar.enter_context(progress_bar("tokens", stays=True))
            task = progress.add_task("", total=run.tokens_to_compute)
            for record in chain([first], steps):
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


def _print_results(
    run: "Replay",
    records: "list[StepRecord]",
    seconds: float,
    json_file: Path | None,
    report: Path | None,
) -> None:
    """Print the tables of a replay without a disagreement, and write its files."""
    from .replay.figures import describe_result, summarize
    from .replay.tables import print_figures

    console = Console()
    figures: dict[str, Any] = summarize(run, records, seconds)
    print_figures(figures, console)
    with sentences_for_errors():
        if json_file is not None:
            write_text(json_file, json.dumps(figures, indent=2) + "\n")
            console.print(f"figures: {json_file}", highlight=False, markup=False)
        if report is not None:
            from .replay.report import write_report

            write_report(report, figures, records)
            console.print(f"report: {report}", highlight=False, markup=False)
    wide = Console(soft_wrap=True)
    wide.print(describe_result(figures), style="bold green", highlight=False)


def _print_disagreement(disagreement: "TwinMismatch") -> None:
    twins = set(disagreement.stored.twins)
    headline = (
        "The twins disagree."
        if len(twins) > 1
        else "The result differs from the reference in float64."
    )
    console = Console(soft_wrap=True)
    console.print(f"[bold red]{headline}[/]")
    console.print(str(disagreement), highlight=False, markup=False)
    if disagreement.path is None:
        last = f"The step is not stored: {disagreement.why_not_stored}"
    else:
        last = (
            "The step is stored. To run it again:\n"
            f"  pagetwin reproduce {disagreement.path}"
        )
    console.print(last, highlight=False, markup=False)
