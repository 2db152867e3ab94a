"""Command `pagetwin tune`: measure the choices of the portable kernels on this GPU."""

import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ...contract.extras import is_missing
from ..arguments import MINUTES, WrongArgument, given_options, number
from ..command_line import (
    choose_interpreter,
    print_error,
    progress_bar,
    sentences_for_errors,
)
from ..files import check_outputs
from .layers import DTYPES, FORMATS, STANDARD, LayerSizes, given_layer, layers_of_model

if TYPE_CHECKING:
    from ...contract.tuning_classes import TuningJob, TuningReport

WRONG = 1
INTERRUPTED = 130
MEMORY_SHARE = 0.25
"""Share of the free memory that the caches of a batch take, if no limit is given."""
MOST_GB = 4.0
SEARCHES = ("coordinate", "exhaustive")

Model = Annotated[
    Path | None,
    typer.Option(
        help="A model's config.json, or its folder.  (a list of usual layers)"
    ),
]
Heads = Annotated[
    str | None,
    typer.Option(help="Query heads/kv heads of a layer, with --head-size."),
]
HeadSize = Annotated[
    int | None, typer.Option(help="Elements of a head.", callback=number(8, 1024))
]
Window = Annotated[
    int | None,
    typer.Option(
        help="Sliding window of the layer.  (none)", callback=number(1, 2**31 - 1)
    ),
]
Dtype = Annotated[
    str | None, typer.Option(help="bfloat16, float16 or float32.  (the model's)")
]
CacheFormatName = Annotated[
    str, typer.Option("--cache-format", help="Format of the cache, as vLLM names it.")
]
Minutes = Annotated[float, typer.Option(help="Limit in minutes.", callback=MINUTES)]
MemoryGb = Annotated[
    float | None,
    typer.Option(
        help="GiB of caches of a batch, at most.  (a quarter of the free ones, at most 4)",
        callback=number(0, 10**6, above=True),
    ),
]
Out = Annotated[
    Path | None, typer.Option(help="The file.  (found by itself, in the cache folder)")
]
SearchName = Annotated[
    str,
    typer.Option(
        "--search", help="coordinate: steps from the default. exhaustive: all values."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be timed, and end.")
]
Show = Annotated[
    bool, typer.Option("--show", help="Print which tables are in use, and end.")
]
Smoke = Annotated[
    bool,
    typer.Option(
        "--smoke", help="Tiny batches, also on a CPU; their times have no meaning."
    ),
]


def tune(
    context: typer.Context,
    model: Model = None,
    heads: Heads = None,
    head_size: HeadSize = None,
    window: Window = None,
    dtype: Dtype = None,
    cache_format: CacheFormatName = "auto",
    minutes: Minutes = 5.0,
    memory_gb: MemoryGb = None,
    out: Out = None,
    search: SearchName = "coordinate",
    dry_run: DryRun = False,
    show: Show = False,
    smoke: Smoke = False,
) -> None:
    """Measure tiles, thresholds and rates of the portable kernels on this GPU, for a model.

    Each candidate's result is compared with the reference before it is timed, and replaces the
    default if it is faster by more than noise. The file is found by pagetwin.optimized in the next
    process, on this chip and with these versions alone.

    Exit codes: 0, the file was written, and has what was measured until the limit. 1, a candidate's
    result was wrong, which is not in the file, or the GPU was lost. 2, nothing could be measured;
    one sentence says why. 130, it was interrupted; the file has the choices that were finished.
    """
    with sentences_for_errors(RuntimeError):
        if show:
            _check_show(given_options(context))
        _check_names(dtype, cache_format, search)
        check_outputs(json=out)
        layers, dtype = _choose_layers(model, heads, head_size, window, dtype)
        if is_missing("triton"):
            from ...engine.triton_versions import why_no_triton

            raise ImportError(why_no_triton())
        device = _choose_device(smoke or show or dry_run)
        choose_interpreter(device)
        if show:
            _print_tables(device)
            return
        if smoke and out is None and not dry_run:
            raise WrongArgument(
                "--smoke needs --out: its times are of no use to others"
            )
        jobs = _make_jobs(layers, dtype, cache_format, memory_gb, device, smoke)
        if dry_run:
            _print_jobs(jobs)
            return
        warnings.filterwarnings("ignore", module="triton.runtime.interpreter")
        report = _watch(jobs, minutes, device, search == "exhaustive")
        path = report.path if out is None else out
        _write(path, report)
    _leave(path, report)


def _check_show(given: set[str]) -> None:
    if ignored := sorted(given - {"show"}):
        names = " and ".join(f"--{option.replace('_', '-')}" for option in ignored)
        raise WrongArgument(f"--show measures nothing: expected it without {names}")


def _check_names(dtype: str | None, cache_format: str, search: str) -> None:
    for name, value, known in (
        ("dtype", dtype, DTYPES),
        ("cache_format", cache_format, FORMATS),
        ("search", search, SEARCHES),
    ):
        if value is not None and value not in known:
            raise WrongArgument(
                f"{name} = {value!r}: expected one of {', '.join(known)}"
            )


def _choose_layers(
    model: Path | None,
    heads: str | None,
    head_size: int | None,
    window: int | None,
    dtype: str | None,
) -> tuple[tuple[LayerSizes, ...], str]:
    """Return the layers that are tuned, and their dtype."""
    default = "bfloat16"
    if model is not None:
        if heads is not None or head_size is not None or window is not None:
            raise WrongArgument(
                "model has heads, head size and window: expected it without these options"
            )
        layers, own = layers_of_model(model)
        return layers, dtype or own or default
    if (heads is None) != (head_size is None):
        raise WrongArgument("heads and head_size: expected both, or --model, or none")
    if heads is None or head_size is None:
        if window is not None:
            raise WrongArgument("window: expected it with --heads and --head-size")
        return STANDARD, dtype or default
    return (given_layer(heads, head_size, window),), dtype or default


def _choose_device(may_be_cpu: bool) -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if not may_be_cpu:
        raise ValueError(
            "torch has no CUDA device here, and times of the interpreter have no meaning: run"
            " `pagetwin tune` on the GPU that is to be tuned, or try it with --smoke --out FILE"
        )
    return "cpu"


def _make_jobs(
    layers: tuple[LayerSizes, ...],
    dtype: str,
    cache_format: str,
    memory_gb: float | None,
    device: str,
    smoke: bool,
) -> "list[TuningJob]":
    import torch

    from .clock import free_memory
    from .jobs import TunedLayer, choose_jobs

    most_gb = MOST_GB
    if (free := free_memory()) is not None:
        most_gb = min(most_gb, MEMORY_SHARE * free / 2**30)
    multiprocessors = 4
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        multiprocessors = properties.multi_processor_count
    kinds = [
        TunedLayer(
            layer,
            dtype,
            cache_format,
            int((memory_gb or most_gb) * 2**30),
            multiprocessors,
            smoke,
        )
        for layer in layers
    ]
    return choose_jobs(kinds)


def _print_jobs(jobs: "list[TuningJob]") -> None:
    for job in jobs:
        rows = f" {job.rows} rows" if job.rows else ""
        cases = "; ".join(case.name for case in job.cases)
        _print_line(f"{job.what}{rows}: {cases}")


def _watch(
    jobs: "list[TuningJob]", minutes: float, device: str, is_exhaustive: bool
) -> "TuningReport":
    """Measure all jobs with a progress bar."""
    from .clock import BenchClock

    twin = _optimized()
    with progress_bar("choices") as progress:
        task = progress.add_task("", total=len(jobs))

        def show(done: int, words: str) -> None:
            progress.update(task, completed=done, description=words)

        report: TuningReport = twin.tune_kernels(
            jobs, BenchClock(device), 60 * minutes, device, is_exhaustive, show
        )
    return report


def _write(path: Path, report: "TuningReport") -> None:
    """Write the file, unless nothing was measured, and print its rows."""
    from ..bench.machine import describe_card, describe_machine
    from .report import lines_of, print_rows, write_tuning

    console = Console(soft_wrap=True)
    if report.record["rows"]:
        machine, card = describe_machine("cpu"), describe_card()
        origin = {
            "date": machine["date"],
            "commit": machine["commit"],
            "driver": None if card is None else card["driver"],
        }
        kept = write_tuning(path, report, origin)
        print_rows(report.record["rows"], Console())
        _print_line(
            f"file: {path}" + f", with {kept} rows of other layers" * bool(kept)
        )
    for line, colour in lines_of(report):
        console.print(line, style=colour, highlight=False, markup=False)


def _leave(path: Path, report: "TuningReport") -> None:
    """Say how the run ended, and exit with the code for it."""
    ended = report.ended
    if ended != "complete":
        is_written = bool(report.record["rows"])
        rest = f"{path} has what was finished" if is_written else "nothing is written"
        print_error(f"{ended}: {rest}", "yellow")
    if ended == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if report.wrong or "lost" in ended:
        raise typer.Exit(WRONG)


def _print_tables(device: str) -> None:
    """Print which tables are in use, and the rows of their file."""
    import json

    from .report import print_rows

    used = _optimized().tuning_in_use(device)
    if used.path is None:
        _print_line(f"the tables of pagetwin ({used.fingerprint})")
        return
    _print_line(f"{used.fingerprint}, from {used.path}")
    print_rows(json.loads(used.path.read_text(encoding="utf-8"))["rows"], Console())


def _optimized() -> Any:
    """Return the package with the functions of a tuning run, besides the operations."""
    return import_module("pagetwin.optimized")


def _print_line(line: str) -> None:
    Console(soft_wrap=True).print(line, highlight=False, markup=False)
