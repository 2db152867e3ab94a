"""Command `pagetwin interpret`: run the Gluon kernels of a file on the CPU, and report faults."""

import importlib.util
import linecache
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .arguments import number
from .command_line import DISAGREE, sentences_for_errors

if TYPE_CHECKING:
    from ..gluon_interpreter import KernelOutcome, Place


def interpret(
    file: Annotated[
        Path,
        typer.Argument(
            help="A Python file that defines launches(), which yields"
            " (kernel, grid, arguments)."
        ),
    ],
    seeds: Annotated[
        int,
        typer.Option(
            help="Orders of roles, programs and copies that each kernel is run in.",
            callback=number(1, 10_000),
        ),
    ] = 8,
) -> None:
    """Run the Gluon kernels of a file on the CPU, and report races, deadlocks, missing fences and
    waits, uninitialized reads and accesses out of bounds.

    No GPU is needed. Each kernel is run in several orders of its roles, and asynchronous copies are
    done at different times.

    Exit codes: 0, no fault was found. 1, a kernel has a fault; its line, the roles and the order
    that shows it are printed. 2, nothing could be run; one sentence says why.
    """
    with sentences_for_errors():
        launches = load_launches(file)
        import torch

        from ..gluon_interpreter import interpret_launches

        torch.set_num_threads(1)
        outcomes = call_file(file, lambda: interpret_launches(launches, seeds))
    console = Console(soft_wrap=True, markup=False, highlight=False)
    for outcome in outcomes:
        print_outcome(outcome, file, console)
    if any(outcome.fault for outcome in outcomes):
        raise typer.Exit(DISAGREE)


def load_launches(file: Path) -> Callable[[], Iterable[Any]]:
    """Return the function `launches` of a file.

    Raises:
        ValueError: The file is not Python, ends with an error or has no such function.
        OSError: The file cannot be read.
        ImportError: Triton is not installed, or the file imports what does not exist.
    """
    expected = "expected a .py file that defines launches()"
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist: {expected}")
    if not file.is_file() or file.suffix != ".py":
        raise ValueError(f"{file} is not a Python file: {expected}")
    if importlib.util.find_spec("triton") is None:
        raise ImportError("pagetwin interpret needs triton, which is for Linux")
    # dataclasses look for their module there
    name = f"interpreted {file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    call_file(file, partial(spec.loader.exec_module, module))
    launches = getattr(module, "launches", None)
    if not callable(launches):
        raise ValueError(
            f"{file} has no function launches: expected one that yields (kernel, grid, arguments)"
        )
    found: Callable[[], Iterable[Any]] = launches
    return found


def call_file(file: Path, function: Callable[[], Any]) -> Any:
    """Return what a function that runs code of a file returns, which may import files beside it.

    Raises:
        ValueError: It ends with an error of the file, or says what is wrong with its launches.
        NotImplementedError: A kernel has an operation that the interpreter does not know.
    """
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        return function()
    except NotImplementedError:
        raise
    except (Exception, SystemExit) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, ValueError):
            words = f"{type(error).__name__}: {words}"
        raise ValueError(f"{file}: {words}") from error
    finally:
        sys.path.remove(folder)


def print_outcome(outcome: "KernelOutcome", file: Path, console: Console) -> None:
    """Print how a kernel ended."""
    fault = outcome.fault
    if fault is None:
        console.print(f"{outcome.kernel}: no fault in {outcome.orders} orders")
        return
    console.print(f"{outcome.kernel}: {fault.kind}", style="bold red")
    console.print(f"  {fault.message}")
    # what is at the line of the fault may be among the others
    lines = {fault.place: f"role {fault.role}"}
    lines |= {place: what for what, place in fault.others}
    for place, what in lines.items():
        if place.line:
            print_line(what, place, file, console)
    program = ", ".join(map(str, fault.program))
    console.print(f"  order: seed {fault.seed}, program ({program}); {fault.turns()}")


def print_line(what: str, place: "Place", file: Path, console: Console) -> None:
    """Print a line of a kernel with its source."""
    name = str(file) if Path(place.file) == file.resolve() else place.file
    console.print(f"  {name}:{place.line}  {what}")
    console.print(
        f"    {linecache.getline(place.file, place.line).strip()}", style="dim"
    )
