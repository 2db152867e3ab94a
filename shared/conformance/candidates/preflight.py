"""Preflight: whether an implementation can be imported, and whether its SUPPORT can be read.

It runs in a process of its own and imports no law. So an implementation that cannot run is reported
before the calling process imports anything slow.
"""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection
from difflib import get_close_matches
from pathlib import Path

from ..base.child_process import lines_of, start
from .file_formats import find_format
from .first_imports import first_imports, is_found

KNOWN = {*sys.stdlib_module_names, "numpy", "pagetwin", "torch", "triton"}
"""Packages whose import does not change where others are found."""
SECONDS = 120.0
"""Time limit of an import."""


def check_can_run(implementation: str, device: str | None) -> str:
    """Return the device on which an implementation runs; raise if it cannot be imported or run.

    Args:
        implementation: As in `check_implementation`.
        device: Optional. The device of the tensors. If None, any device will do.

    Returns:
        The given device, or the one that `choose_device` chooses.

    Raises:
        FileNotFoundError, ImportError: The implementation does not exist, or its import raises or
            ends the process.
        ValueError: The device is not available, the implementation has none of the operations, its
            SUPPORT names something unknown, or a file of a registered format is invalid.
    """
    _check_exists(implementation)
    _check_source(implementation)
    _check_name_of_device(device)
    with tempfile.TemporaryFile("w+") as output:
        process = start(__name__, None, output)
        try:
            said, _ = process.communicate(json.dumps([implementation, device]), SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        for line in lines_of(iter(said.splitlines(True))):
            kind, sentence = json.loads(line)  # without a kind, the device
            if kind:
                raise (ValueError if kind == "ValueError" else ImportError)(sentence)
            return str(sentence)
        output.seek(0)
        last = [line for line in output.read().splitlines() if line.strip()][-1:]
    ended = f"the process ended with code {process.returncode}"
    raise ImportError(
        f"{implementation} cannot be imported: {': '.join([ended, *last])}"
    )


def main(say: Callable[[str], None]) -> None:
    """Import the implementation that standard input names, and say the error.

    The process ends here: an orderly end of one that imported torch takes a quarter of a second.
    """
    implementation, device = json.loads(sys.stdin.read())
    try:
        chosen = choose_device(device)
        _load(implementation, chosen)
    except Exception as error:
        say(json.dumps([type(error).__name__, str(error)]))
    else:
        say(json.dumps(["", chosen]))
    os._exit(0)


def choose_device(device: str | None) -> str:
    """Return the device of the tensors; by default CUDA if it is available, else the CPU.

    Raises:
        ValueError: The device is not available.
    """
    import torch

    _check_name_of_device(device)
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device = {device!r}: no GPU is usable here; expected cpu")
    index = device.partition(":")[2]
    if index and int(index) >= (count := torch.cuda.device_count()):
        numbers = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise ValueError(
            f"device = {device!r}: expected cuda, or a visible GPU: {numbers}"
        )
    return device


def _check_name_of_device(device: str | None) -> None:
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(
            f"device = {device!r}: expected cpu or cuda, or the number of a GPU as in cuda:1"
        )


def _check_exists(implementation: str) -> None:
    """Raise if there is neither a file nor a module of this name, or a file is invalid.

    Nothing is imported.
    """
    if implementation in ("reference", "optimized"):
        return
    if (own := find_format(implementation)) is not None:
        own.check(implementation)
        return
    if implementation.endswith(".py"):
        if not Path(implementation).is_file():
            raise ModuleNotFoundError(
                f"implementation = {implementation!r}: the file does not exist"
            )
        return
    top = implementation.partition(".")[0]
    if not top.isidentifier() or Path(implementation).is_file():
        is_folder = Path(implementation).is_dir()
        what = "is a folder" if is_folder else "is neither a module nor a .py file"
        raise ModuleNotFoundError(
            f"implementation = {implementation!r} {what}: expected reference, optimized, the"
            " dotted name of a module or package, or a .py file"
        )
    if not (
        Path(top).is_dir()
        or Path(f"{top}.py").is_file()
        or importlib.util.find_spec(top) is not None
    ):
        raise ModuleNotFoundError(
            f"implementation = {implementation!r}: module {top} does not exist here; expected"
            " reference, optimized, a module or package that can be imported, or a .py file"
        )


def _check_source(implementation: str) -> None:
    """Raise if the file of an implementation is not valid Python, or imports what is missing.

    This takes no process that imports torch. It is looked for only until an import that may change
    where others are found.
    """
    is_file = implementation.endswith(".py")
    file = Path(implementation if is_file else f"{implementation}.py")
    if not file.is_file():
        return
    source = file.read_bytes()
    cannot = f"{implementation} cannot be imported: "
    try:
        tree = ast.parse(source, file.name)
    except SyntaxError as error:
        raise ImportError(f"{cannot}SyntaxError: {error}") from None
    except ValueError:
        return
    if b"sys." in source:
        return
    for name, line in first_imports(tree):
        here = file.parent / name
        if not (here.is_dir() or here.with_suffix(".py").is_file() or is_found(name)):
            raise ImportError(
                f"{cannot}No module named {name!r} (line {line}): install {name}, or correct the"
                " import"
            )
        if name not in KNOWN:
            return


def _load(implementation: str, device: str) -> None:
    import torch

    from ...contract.attention_options import OPTION_NAMES
    from .candidate import load_candidate

    try:
        candidate = load_candidate(implementation)
    except Exception as error:
        if str(error).startswith(("implementation = ", f"{implementation} has none")):
            raise
        where = _line_in(implementation, error)
        name = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        sentence = f"{name}{error}".split("\n")[0] + where
        if isinstance(error, ModuleNotFoundError):
            sentence += f": install {error.name}, or correct the import"
        kind = ValueError if isinstance(error, ValueError) else ImportError
        raise kind(f"{implementation} cannot be imported: {sentence}") from error
    support = candidate.support
    _check_names(implementation, "operations", support.operations, _operations())
    _check_names(implementation, "dtypes", support.dtypes, _dtypes())
    stored = _dtypes() | _latent_formats()
    _check_names(implementation, "cache_dtypes", support.cache_dtypes, stored)
    for dtypes in support.tensor_dtypes.values():
        _check_names(implementation, "tensor_dtypes", dtypes, _dtypes())
    if others := set(support.options or ()) - {*OPTION_NAMES, "scale", "out", "lse"}:
        _check_names(implementation, "options", others, _options())
    if why := support.why_not_device(torch.device(device)):
        raise ValueError(
            f"device = {device!r}: {implementation} does not support {why}"
        )


def _line_in(implementation: str, error: Exception) -> str:
    """Return the line of an implementation that raised an error, in parentheses, or nothing."""
    if (file_format := find_format(implementation)) is not None:
        return file_format.line_of(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if Path(frame.filename).stem == implementation.split(".")[-1]
        or frame.filename.endswith(implementation)
    ]
    return f" (line {own[-1].lineno})" if own else ""


def _operations() -> set[str]:
    from ...contract.operations import CONCEPTS

    names = {operation for concept in CONCEPTS for operation in concept.operations}
    return names | {"BACKENDS"}


def _options() -> set[str]:
    """Return the names of options, and of the other arguments that have a default."""
    from ...contract.attention_options import OPTION_NAMES
    from .candidate import arguments_with_default

    return {*OPTION_NAMES, "value_head_size", *arguments_with_default()}


def _dtypes() -> set[str]:
    import torch

    return {
        name for name, value in vars(torch).items() if isinstance(value, torch.dtype)
    }


def _latent_formats() -> set[str]:
    from ...contract.latent_formats import LATENT_FORMATS

    return set(LATENT_FORMATS)


def _check_names(
    implementation: str, field: str, names: Collection[str] | None, known: set[str]
) -> None:
    """Raise if SUPPORT names something unknown, which no law would ever try."""
    for name in names or ():
        if not isinstance(name, str) or name not in known:
            close = get_close_matches(str(name), known, 1, 0.3)
            likely = f", such as {close[0]!r}" if close else ""
            what = field if field in ("operations", "options") else "torch dtypes"
            raise ValueError(
                f"{implementation}: SUPPORT.{field} has {name!r}: expected names of {what}"
                f"{likely}"
            )
