"""How is a recorded case read, and when does a result equal it?

A case file holds what vLLM's function returned for some inputs (README.md tells the format). An
adapter, one for each file, calls our function on the inputs and returns a dictionary with the
fields of `expected`.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).parent
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}
NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
SKIP = object()
"""What an adapter returns for a field that has no counterpart here; it gives the reason."""
NAMED_ERRORS = (
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    ImportError,
    NotImplementedError,
    RuntimeError,
)
"""Errors that a call here raises on purpose."""


def attempt(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return what a call returns, or {"raises": name} as recorded if it raises a named error."""
    try:
        return call(*arguments, **named)
    except NAMED_ERRORS as error:
        return {"raises": type(error).__name__, "message": str(error)}


def is_error(value: Any) -> bool:
    """Return whether a recorded or found value says that a call raised."""
    return isinstance(value, Mapping) and "raises" in value


@dataclass(frozen=True)
class Case:
    """One recorded call.

    Args:
        file: the file's name without its ending.
        name: the case's name.
        inputs: arguments, tensors decoded.
        expected: what vLLM returned, as recorded; {"raises": ...} if it raised.
        other: what other versions returned, where they differ.
    """

    file: str
    name: str
    inputs: dict[str, Any]
    expected: dict[str, Any]
    other: dict[str, Any]


def read_cases(folder: Path, file: str) -> list[Case]:
    """Return the cases of a file."""
    recorded = json.loads((folder / f"{file}.json").read_text(encoding="utf-8"))
    return [
        Case(
            file,
            case["name"],
            decode(case["inputs"]),
            with_tolerance(case),
            case.get("expected_other", {}),
        )
        for case in recorded["cases"]
    ]


def with_tolerance(case: dict[str, Any]) -> Any:
    """Return the recorded result with its tolerance, which newer files have beside it.

    A function that returned None has this as its result.
    """
    if case["expected"] is None:
        return {"result": None}
    if "tolerance" not in case:
        return case["expected"]
    return {"tolerance": case["tolerance"], **case["expected"]}


def decode(value: Any) -> Any:
    """Return a recorded value with its tensors made."""
    if isinstance(value, dict):
        if is_tensor(value):
            return decode_tensor(value)
        return {name: decode(element) for name, element in value.items()}
    if isinstance(value, list):
        return [decode(element) for element in value]
    return NUMBERS.get(value, value) if isinstance(value, str) else value


def move(value: Any, device: torch.device, name: str = "") -> Any:
    """Return inputs on a device; what is called `_cpu` stays on the host."""
    if isinstance(value, dict):
        return {key: move(element, device, key) for key, element in value.items()}
    if isinstance(value, list):
        return [move(element, device, name) for element in value]
    if isinstance(value, torch.Tensor) and not name.endswith("_cpu"):
        return value.to(device)
    return value


def is_tensor(recorded: Mapping[str, Any]) -> bool:
    """Return whether a recorded value is a tensor: its numbers, or the bytes of each of them."""
    names = recorded.keys()
    return names >= {"dtype", "shape"} and ("data" in names or "bytes" in names)


def decode_tensor(recorded: Mapping[str, Any]) -> torch.Tensor:
    """Return a recorded tensor."""
    dtype = DTYPES[recorded["dtype"].removeprefix("torch.")]
    if "bytes" in recorded:  # FP8 has no numbers in JSON
        raw = torch.tensor(recorded["bytes"], dtype=torch.uint8)
        return raw.view(dtype).reshape(recorded["shape"])
    data = _numbers(recorded["data"])
    return torch.tensor(data, dtype=dtype).reshape(recorded["shape"])


def _numbers(data: Any) -> Any:
    if isinstance(data, list):
        return [_numbers(row) for row in data]
    return NUMBERS.get(data, data) if isinstance(data, str) else data


def differences(
    found: Any, expected: Any, tolerance: Mapping[str, float] | None, path: str = ""
) -> Iterator[str]:
    """Yield where a result differs from what was recorded; nothing if it is equal.

    Tensors are compared with their dtype and shape, numbers exactly unless a tolerance was
    recorded, tuples as lists. Two errors are equal, whatever their types and messages are.
    """
    if found is SKIP:
        return
    if is_error(found) or is_error(expected):
        if not (is_error(found) and is_error(expected)):
            yield f"{path}.raises: found {found}, expected {expected}"
        return
    if isinstance(expected, dict) and is_tensor(expected):
        yield from _tensor_differences(found, decode_tensor(expected), tolerance, path)
    elif isinstance(expected, dict):
        if not isinstance(found, Mapping):
            yield f"{path} = {found!r}: expected {expected}"
            return
        found = {str(name): value for name, value in found.items()}
        for name, value in expected.items():
            if name not in found:
                yield f"{path}.{name} is missing: expected {value}"
                continue
            yield from differences(found[name], value, tolerance, f"{path}.{name}")
    elif expected is None:
        if found is not None:
            yield f"{path} = {found!r}: expected None"
    elif isinstance(expected, list):
        if isinstance(found, torch.Tensor | np.ndarray):
            found = found.tolist()
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            yield f"{path} = {found!r}: expected {expected}"
            return
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from differences(one, other, tolerance, f"{path}[{place}]")
    elif not _same_number(found, _numbers(expected), tolerance):
        yield f"{path} = {found!r}: expected {expected!r}"


def _same_number(
    found: Any, expected: Any, tolerance: Mapping[str, float] | None
) -> bool:
    if isinstance(found, torch.Tensor | np.generic):
        found = found.item()
    if isinstance(expected, float) and isinstance(found, int | float):
        if math.isnan(expected):
            return math.isnan(found)
        if tolerance and math.isfinite(expected):
            allowed = tolerance["atol"] + tolerance["rtol"] * abs(expected)
            return abs(found - expected) <= allowed
        return math.isclose(found, expected, rel_tol=1e-6, abs_tol=0.0)
    return bool(found == expected) and isinstance(found, bool) == isinstance(
        expected, bool
    )


def _tensor_differences(
    found: Any,
    expected: torch.Tensor,
    tolerance: Mapping[str, float] | None,
    path: str,
) -> Iterator[str]:
    if isinstance(found, np.ndarray):
        found = torch.from_numpy(found)
    if not isinstance(found, torch.Tensor):
        yield f"{path} = {found!r}: expected a tensor {expected.dtype} {list(expected.shape)}"
        return
    found = found.detach().cpu()
    if found.dtype != expected.dtype or found.shape != expected.shape:
        yield (
            f"{path} is {found.dtype} {list(found.shape)}: expected {expected.dtype}"
            f" {list(expected.shape)}"
        )
        return
    if expected.is_floating_point() and expected.element_size() == 1:
        same = found.view(torch.uint8) == expected.view(torch.uint8)
    elif expected.is_floating_point():
        rtol, atol = (tolerance or {}).get("rtol", 0), (tolerance or {}).get("atol", 0)
        same = torch.isclose(found, expected, rtol=rtol, atol=atol, equal_nan=True)
    else:
        same = found == expected
    if not bool(same.all()):
        place = (~same).nonzero()[0].tolist()
        yield (
            f"{path}{place} = {found[tuple(place)].item()}: expected"
            f" {expected[tuple(place)].item()}"
        )


# ---- adapters

ON_DEVICE: set[str] = set()
"""Files whose adapters launch kernels: on a machine with a GPU their inputs are there."""
INTERPRETER_ONLY: dict[str, str] = {}
"""Files that compiled kernels cannot run on the optimized twin, and why."""
Adapter = Callable[[Any, dict[str, Any]], dict[str, Any]]
ADAPTERS: dict[tuple[str, str], Adapter] = {}


def adapter(
    file: str, version: str = "", on_device: bool = False, interpreter_only: str = ""
) -> Callable[[Adapter], Adapter]:
    """Register a function that runs a file's cases.

    It gets a twin (every operation as an attribute, and `twin.name`) and a case's inputs, and
    returns the fields of `expected`; SKIP for a field that says something about vLLM alone.

    Args:
        file: the case file's name without its ending.
        version: empty, or the vLLM version whose results (`expected_other`, or `expected` where
            that version did the same) the function gives.
        on_device: whether it launches kernels.
        interpreter_only: why compiled kernels cannot run it on the optimized twin.
    """
    if interpreter_only:
        INTERPRETER_ONLY[file] = interpreter_only
    if on_device:
        ON_DEVICE.add(file)

    def register(function: Adapter) -> Adapter:
        assert (file, version) not in ADAPTERS, f"two adapters of {file} {version}"
        ADAPTERS[file, version] = function
        return function

    return register
