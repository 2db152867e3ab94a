"""Changes of kernels that the Gluon interpreter or a test of it reports."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pagetwin.gluon_interpreter.kernels import change_module

KERNELS = Path(__file__).parents[2] / "optimized/kernels"


class Fault(NamedTuple):
    """A change of a kernel.

    Args:
        file: in `optimized/kernels`.
        old, new: the text that the file has once, and what takes its place.
        case: one of CASES that shows it.
        report: what is reported.
    """

    file: str
    old: str
    new: str
    case: str
    report: str


@contextmanager
def changed_kernels(folder: Path, old: str, new: str, *files: str) -> Iterator[None]:
    """Interpret kernels with a text of one file replaced.

    Args:
        folder: an empty folder, for the changed file.
        old, new: the text, which one of the files has once, and what takes its place.
        files: in `optimized/kernels`.
    """
    (name,) = [file for file in files if old in (KERNELS / file).read_text("utf-8")]
    text = (KERNELS / name).read_text("utf-8")
    assert text.count(old) == 1
    path = folder / Path(name).name
    path.write_text(text.replace(old, new), encoding="utf-8")
    module = name.removesuffix(".py").replace("/", ".")
    with change_module(f"pagetwin.optimized.kernels.{module}", path):
        yield
