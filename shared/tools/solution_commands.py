"""Options for solutions of FlashInfer-Bench, and command `pagetwin export`."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..contract.extras import require
from .arguments import check_different
from .command_line import choose_interpreter, sentences_for_errors
from .files import check_folder, make_folder, write_text

if TYPE_CHECKING:
    from ..conformance.reports.report import Report

SolutionFile = Annotated[
    Path | None,
    typer.Option(
        "--solution",
        help="Instead of MODULE, a JSON file with a solution of a FlashInfer-Bench definition.",
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Write to this file how the solution ended on each workload, a JSON per line.",
    ),
]


def choose_implementation(
    module: str | None, solution: Path | None, trace: Path | None, device: str | None
) -> str:
    """Return what is checked: a module, or the file of a solution.

    Raises:
        ValueError: Not exactly one of both is given, a trace of a module is requested, or one of
            kernels that are interpreted with another dtype. Or as `read_solution`.
        FileNotFoundError, ImportError: As `read_solution`.
    """
    if (module is None) == (solution is None):
        given = "none" if module is None else "both"
        raise ValueError(f"{given} given: expected a MODULE or --solution FILE")
    if solution is None:
        if trace is not None:
            raise ValueError(
                f"--trace {trace} without --solution: expected the file of a solution"
            )
        assert module is not None
        return module
    from ..conformance.flashinfer_bench.solutions import read_solution

    file = str(solution)
    found = read_solution(file)
    if not file.endswith(".json"):
        raise ValueError(f"solution = {file!r}: expected a name that ends with .json")
    if trace is not None and found.language == "triton":
        choose_interpreter(device)
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise ValueError(
                f"--trace {trace}: the interpreter runs the kernels of {file} in float32, and the"
                " workloads are in bfloat16; expected a machine with a GPU, or no --trace"
            )
    return file


def print_interpreted(file: str, console: Console) -> None:
    """Print that kernels were interpreted, if they were."""
    from ..conformance.flashinfer_bench.adapter import INTERPRETED, is_interpreted
    from ..conformance.flashinfer_bench.definitions import DTYPE
    from ..conformance.flashinfer_bench.solutions import read_solution

    solution = read_solution(file)
    if is_interpreted(solution):
        words = (
            f"[yellow]interpreted[/]: tensors are {INTERPRETED}, because arithmetic in"
        )
        words += f" {DTYPE} is wrong in the interpreter; check {DTYPE} on a GPU"
        console.print(words, highlight=False)


def write_traces(path: Path, report: "Report", seconds_of_a_case: float) -> None:
    """Try a checked solution on the workloads of its definition, and write the traces."""
    from ..conformance.flashinfer_bench.solutions import read_solution
    from ..conformance.flashinfer_bench.traces import judge_workloads, with_laws

    solution = read_solution(report.implementation)
    traces = judge_workloads(solution, report.device, seconds_of_a_case)
    lines = [json.dumps(trace) for trace in with_laws(traces, report)]
    write_text(path, "\n".join([*lines, ""]))


def export(
    folder: Annotated[
        Path, typer.Argument(help="The folder of a dataset. It is created if needed.")
    ],
    definition: Annotated[
        list[str] | None,
        typer.Option(
            help="A definition, such as gqa_paged_decode_h32_kv8_d128_ps64. May be repeated."
            "  (nine of them)",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write definitions, workloads and the reference in the format of FlashInfer-Bench.

    Exit codes: 0, written. 2, a definition is not known or a file cannot be written; one sentence
    says why.
    """
    with sentences_for_errors():
        from ..conformance.flashinfer_bench.definitions import find_definition

        check_different("definition", definition or ())
        for name in definition or ():
            find_definition(name)
        check_folder("folder", folder)
        require("pagetwin export", "hypothesis")
        make_folder("folder", folder)
        from ..conformance.flashinfer_bench.export import export_definitions

        counts = export_definitions(folder, definition)
    console = Console(soft_wrap=True)
    for name, count in counts.items():
        console.print(f"{name}: {count} workloads", highlight=False)
    console.print(f"written: {folder}", highlight=False, markup=False)
