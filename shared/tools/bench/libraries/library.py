"""AttentionLibrary: the interface between the benchmark and one implementation of attention.

A library reports why it is missing, or why it does not support a workload. Data that it prepares
once for all layers of a step (a mask, a plan, a gathered batch) is prepared before the timing, and
named in its note.
"""

import importlib
import importlib.metadata
import importlib.util
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..inputs import Inputs
from ..sparse.inputs import AnyInputs, IndexInputs, SelectInputs, SparseInputs
from ..workloads import Workload

BLOCKS_OF_ONE = "slots as a block table of blocks of one, prepared in advance"


class Declined(NotImplementedError):
    """A workload that a library does not support. The message says why."""


def unchanged(result: Any) -> Any:
    """Return rows that have the shape of rows already."""
    return result


@dataclass(frozen=True)
class Prepared:
    """One workload, ready to be run any number of times.

    Args:
        call: Computes the workload and returns the tensor that it wrote. If it returns None, it
            wrote the cache.
        rows: Returns that tensor as [tokens, query_heads, head_size].
        note: What was prepared in advance, or what differs from the other libraries.
        same_work: Whether it does the same work as the others. If False, it reads keys that were
            gathered for it, so its time is shown but not used as a baseline.
        rounds_more: Whether it rounds queries or weights to fewer bits, or codes less exactly. A
            workload of codes may time it although its error exceeds the budget. The error is then
            shown.
    """

    call: Callable[[], Any]
    rows: Callable[[Any], Tensor] = unchanged
    note: str = ""
    same_work: bool = True
    rounds_more: bool = False


class AttentionLibrary(ABC):
    """One implementation of attention that the benchmark can time.

    Args:
        device: The device to run on, "cuda" or "cpu".
    """

    name: str
    title: str
    package: str | None = None

    def __init__(self, device: str) -> None:
        self.device = device

    def missing(self) -> str:
        """Return why the library cannot be used here. An empty string means that it can."""
        return ""

    def version(self) -> str | None:
        """Return the version of its package, or None if it is unknown."""
        try:
            return importlib.metadata.version(self.package or "pagetwin")
        except importlib.metadata.PackageNotFoundError:
            return None

    @contextmanager
    def watch(self) -> Iterator[list[str]]:
        """Watch a call; the list holds the names of the kernels at the end, if they are known."""
        yield []

    def prepare_any(self, inputs: AnyInputs) -> Prepared:
        """Return a workload of any kind, ready to run.

        Raises:
            Declined: The library does not support this workload.
        """
        if isinstance(inputs, IndexInputs):
            return self.prepare_scores(inputs)
        if isinstance(inputs, SelectInputs):
            return self.prepare_selection(inputs)
        if isinstance(inputs, SparseInputs):
            return self.prepare_sparse(inputs)
        return self.prepare(inputs)

    def prepare_sparse(self, inputs: SparseInputs) -> Prepared:
        """Return attention over selected keys: paged attention over blocks of one slot."""
        prepared = self.prepare(inputs.paged)
        notes = [note for note in (prepared.note, BLOCKS_OF_ONE) if note]
        return replace(prepared, note="; ".join(notes))

    def prepare_scores(self, inputs: IndexInputs) -> Prepared:
        """Return the scores of an indexer: a tensor [tokens, keys]."""
        raise Declined("it has no indexer")

    def prepare_selection(self, inputs: SelectInputs) -> Prepared:
        """Return the positions of the largest scores: a tensor [tokens, selected]."""
        raise Declined("it does not select keys")

    @abstractmethod
    def prepare(self, inputs: Inputs) -> Prepared:
        """Return a workload, ready to run.

        Raises:
            Declined: The library does not support this workload.
        """


def decline_features(workload: Workload, supported: Collection[str] = ()) -> None:
    """Decline a workload that needs a feature which a library does not support here.

    Args:
        workload: The workload.
        supported: Features that the library supports, in the words of `Workload.features`.

    Raises:
        Declined: The message names the features.
    """
    if lacking := sorted(workload.features.difference(supported)):
        raise Declined(f"it does not support {' or '.join(lacking)} here")


def describe_origin(path: str) -> str:
    """Return where a file of operators comes from: the version of the vLLM around it, or its name.

    Example:
        /site-packages/vllm/_flashmla_C.abi3.so beside vllm-0.33.0.dist-info: "operators of vLLM
        0.33.0".
    """
    file = Path(path)
    package = next((folder for folder in file.parents if folder.name == "vllm"), None)
    if package is not None:
        for info in package.parent.glob("vllm-*.dist-info"):
            return f"operators of vLLM {info.name.removesuffix('.dist-info')[5:]}"
        start = package / "__init__.py"
        text = start.read_text(encoding="utf-8") if start.is_file() else ""
        if named := re.search(r"__version__ = ['\"]([^'\"]+)", text):
            return f"operators of vLLM {named[1]}"
    return f"operators of {file.name}"


def library_error(name: str, error: Exception) -> str:
    """Return in one line why a library cannot be used."""
    message = str(error).strip().split("\n")[0]
    return f"{name} cannot be used ({type(error).__name__}: {message})"


def why_no_modules(*names: str, install: str) -> str:
    """Return why modules of one library cannot be imported; empty if they can.

    Args:
        install: what pip has to install.
    """
    library = names[0].partition(".")[0]
    if not has_module(library):
        return f"not installed (pip install {install})"
    try:
        with _without_warnings(library):
            for name in names:
                importlib.import_module(name)
    except Exception as error:  # a broken installation fails in many ways
        return library_error(library, error)
    return ""


@contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    """Drop the warnings of a library's import, which concern parts of it that are not timed."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def has_module(name: str) -> bool:
    """Return whether a module of that name can be found, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
