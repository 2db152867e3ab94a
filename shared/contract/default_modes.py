"""Products of matrices as under torch's default settings, whatever modes a caller has set.

Autocast, TF32 and products with a 16-bit accumulator change the dtype in which torch multiplies
matrices. An engine sets them for the layers of its model. The arithmetic of an operation has the
dtype that its arguments say.
"""

import threading
from contextlib import ExitStack, suppress
from typing import Any

import torch

_BACKENDS: Any = torch.backends
_FLOAT32: tuple[Any, ...] = (_BACKENDS.cuda.matmul, _BACKENDS.mkldnn.matmul)
"""Settings whose `fp32_precision` says how a backend multiplies float32."""
_HALF = {
    "cublas_allow_fp16_reduced_precision_reduction": True,
    "cublas_allow_bf16_reduced_precision_reduction": True,
    "cublas_allow_fp16_accumulation": False,
}
"""Settings of 16-bit products, and torch's defaults. Some are two numbers with one default."""
# attributes of torch.backends.cuda.matmul take 1.4 us each, and these functions 0.06 us
_READ_HALF = [getattr(torch._C, f"_get_{name}") for name in _HALF]
_DEFAULT_HALF = [
    (default,) * len(found) if isinstance(found := read(), tuple) else default
    for read, default in zip(_READ_HALF, _HALF.values(), strict=True)
]


class _Process:
    """What all threads share.

    Args:
        inside: Number of contexts that threads are in.
        restore: Sets the values from before. None if they were the defaults.
    """

    lock = threading.Lock()
    inside = 0
    restore: ExitStack | None = None


_process = _Process()


class default_modes:
    """A context in which products of matrices do not depend on torch's global modes.

    Autocast belongs to a thread, the settings of products to the process. They are changed only if
    they are not the defaults, and restored when the last thread leaves its context.
    """

    def __enter__(self) -> None:
        self._autocast = None
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            self._autocast = _leave_autocast()
        with _process.lock:
            if not _process.inside and not are_default():
                _process.restore = _use_defaults()
            _process.inside += 1

    def __exit__(self, *error: object) -> None:
        with _process.lock:
            _process.inside -= 1
            if not _process.inside and _process.restore is not None:
                _process.restore.close()
                _process.restore = None
        if self._autocast is not None:
            self._autocast.close()


def _leave_autocast() -> ExitStack:
    """Disable autocast, and return what enables it again."""
    stack = ExitStack()
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def are_default() -> bool:
    """Return whether the settings of products are torch's defaults (0.4 us). Not of autocast."""
    try:
        if torch.get_float32_matmul_precision() != "highest":
            return False
    except RuntimeError:
        # the backends disagree
        return False
    return [read() for read in _READ_HALF] == _DEFAULT_HALF


def _use_defaults() -> ExitStack:
    """Set torch's defaults, and return what sets the values from before."""
    restore = ExitStack()
    float32 = [backend.fp32_precision for backend in _FLOAT32]
    if not {"tf32", "bf16"}.isdisjoint(float32):
        for backend, value in zip(_FLOAT32, float32, strict=True):
            restore.callback(setattr, backend, "fp32_precision", value)
        # raises if the backends disagree, so no value is that of all
        with suppress(RuntimeError):
            # runs before those of each backend, which are called in reverse
            restore.callback(
                torch.set_float32_matmul_precision,
                torch.get_float32_matmul_precision(),
            )
        torch.set_float32_matmul_precision("highest")
    for name, read, default in zip(_HALF, _READ_HALF, _DEFAULT_HALF, strict=True):
        write = getattr(torch._C, f"_set_{name}")
        restore.callback(write, *_numbers(read()))
        write(*_numbers(default))
    return restore


def _numbers(value: bool | tuple[bool, ...]) -> tuple[bool, ...]:
    return value if isinstance(value, tuple) else (value,)
