"""Global modes of Python and torch that a call must leave as they are.

A mode that a call leaves changed affects the code that runs next: other kernels and the comparison.
What an import sets is not compared, because only calls are.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import _pop_mode as _pop_function_mode
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode

SMALLEST = 5e-324
"""The smallest float64, which is 0 if denormal numbers are flushed."""
UNKNOWN = object()
"""A mode that torch cannot state, such as TF32 if it was set by old and by new names."""


class Mode(NamedTuple):
    """A global mode.

    Args:
        name: In words.
        read: Return its value.
        write: Set it to a value.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _write_grad_mode(value: bool) -> None:
    torch.set_grad_enabled(value)


def _write_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _read_device() -> Any:
    """Return what sets the default device, or None."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _write_device(value: Any) -> None:
    torch.set_default_device(None if value is None else value.device)


def _write_function_modes(value: int) -> None:
    while torch._C._len_torch_function_stack() > value:
        _pop_function_mode()  # type: ignore[no-untyped-call]


def _write_dispatch_modes(value: int) -> None:
    while torch._C._len_torch_dispatch_stack() > value:
        _pop_dispatch_mode()


def _write_autocast(value: tuple[Any, ...]) -> None:
    *devices, nesting = value
    for device, (is_on, dtype) in zip(("cpu", "cuda"), devices, strict=True):
        torch.set_autocast_enabled(device, is_on)
        torch.set_autocast_dtype(device, dtype)
    while _nesting() > nesting:
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()


def _read_autocast() -> tuple[Any, ...]:
    return (
        (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        _nesting(),
    )


def _nesting() -> int:
    """Return how many autocast contexts are open; weights stay cast until the last one ends."""
    torch.autocast_increment_nesting()
    found: int = torch.autocast_decrement_nesting()
    return found


def _read_seeds() -> tuple[int, ...]:
    """Return the seed of each generator. Drawing from a generator does not change its seed."""
    return torch.default_generator.initial_seed(), *(
        generator.initial_seed() for generator in torch.cuda.default_generators
    )


def _write_seeds(value: tuple[int, ...]) -> None:
    every = torch.default_generator, *torch.cuda.default_generators
    for generator, seed in zip(every, value, strict=False):
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)


def _write_cudnn(value: tuple[bool, bool, bool]) -> None:
    torch.backends.cudnn.allow_tf32 = value[0]
    torch.backends.cudnn.benchmark = value[1]
    torch.backends.cudnn.deterministic = value[2]


def _write_tf32(value: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = value


MODES = (
    Mode("the profile function", sys.getprofile, sys.setprofile),
    Mode("the trace function", sys.gettrace, sys.settrace),
    Mode("the profile function of threads", threading.getprofile, threading.setprofile),
    Mode("the trace function of threads", threading.gettrace, threading.settrace),
    Mode("the default device", _read_device, _write_device),
    Mode(
        "torch function modes",
        torch._C._len_torch_function_stack,
        _write_function_modes,
    ),
    Mode(
        "torch dispatch modes",
        torch._C._len_torch_dispatch_stack,
        _write_dispatch_modes,
    ),
    Mode("grad mode", torch.is_grad_enabled, _write_grad_mode),
    Mode("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Mode("the number of threads", torch.get_num_threads, torch.set_num_threads),
    Mode("autocast", _read_autocast, _write_autocast),
    Mode(
        "deterministic algorithms",
        lambda: (
            torch._C._get_deterministic_algorithms(),
            torch._C._get_deterministic_algorithms_warn_only(),
        ),
        _write_deterministic,
    ),
    Mode(
        "flushing of denormal numbers",
        lambda: SMALLEST * 1.0 == 0.0,
        torch.set_flush_denormal,
    ),
    Mode("the seed", _read_seeds, _write_seeds),
    Mode(
        "the precision of matrix products",
        torch._C._get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    Mode("TF32 of matrix products", torch._C._get_cublas_allow_tf32, _write_tf32),
    Mode(
        "modes of cuDNN",
        lambda: (
            torch._C._get_cudnn_allow_tf32(),
            torch._C._get_cudnn_benchmark(),
            torch._C._get_cudnn_deterministic(),
        ),
        _write_cudnn,
    ),
)
"""The modes that are compared. The default device is a torch function mode, too."""


def _begins_with(new: Any, old: Any) -> bool:
    are_tuples = isinstance(new, tuple) and isinstance(old, tuple)
    return are_tuples and new[: len(old)] == old


def read_modes() -> list[Any]:
    """Return the value of each mode."""
    found = []
    for mode in MODES:
        try:
            found.append(mode.read())
        except RuntimeError:
            found.append(UNKNOWN)
    return found


def restore_modes(before: list[Any]) -> str:
    """Restore the modes, and return the name of the first that was changed, or nothing.

    Args:
        before: What `read_modes` returned.
    """
    found = read_modes()
    if found == before:
        return ""
    changed = ""
    for mode, old, new in zip(MODES, before, found, strict=True):
        if old == new or (mode.read is _read_seeds and _begins_with(new, old)):
            continue  # a GPU that is used for the first time has a seed, too
        if old is not UNKNOWN:
            mode.write(old)
        changed = changed or mode.name
    return changed
