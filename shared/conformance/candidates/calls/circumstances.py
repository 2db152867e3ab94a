"""Circumstances of a call that are not its inputs: global modes of torch, numpy and Python.

A mode is entered around each call of an operation, on the thread that calls it.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Mode = Callable[[torch.device], AbstractContextManager[Any]]
"""A function of the device of the inputs."""


_LOCK = threading.RLock()
_users: dict[Mode, list[AbstractContextManager[Any]]] = {}
"""Users of each mode of the whole process. The first one enters it, and the last one leaves it."""


def of_process(mode: Mode) -> Mode:
    """Return a mode of the whole process that several threads may be in at once.

    Ranks are threads. If each one restored what it had found, the first to leave would end the mode
    for the others, and the last would leave it set.
    """

    @contextmanager
    def shared(device: torch.device) -> Iterator[None]:
        with _LOCK:
            users = _users.setdefault(mode, [])
            own = nullcontext() if users else mode(device)
            own.__enter__()
            users.append(own)
        try:
            yield
        finally:
            with _LOCK:
                # the one that has entered it is the first
                users.pop(1 if len(users) > 1 else 0).__exit__(None, None, None)

    return shared


@of_process
@contextmanager
def _default_dtype(device: torch.device) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _autocast(device: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        for kind in {device.type, "cpu"}:
            stack.enter_context(torch.autocast(kind, torch.bfloat16))
        yield


class _RoundedFactors(TorchFunctionMode):
    """Products of matrices as a processor computes them that has units for reduced precision."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Round float32 factors to bfloat16 where torch's settings allow it."""
        is_product = getattr(func, "__name__", "") in PRODUCTS
        if is_product and torch.get_float32_matmul_precision() != "highest":
            args = [_rounded(argument) for argument in args]
        return func(*args, **(kwargs or {}))


PRODUCTS = {
    "__matmul__", "__rmatmul__", "addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "einsum",
    "inner", "linear", "matmul", "mm", "mv", "scaled_dot_product_attention", "tensordot", "vdot",
}  # fmt: skip
"""Functions of torch that multiply matrices."""
HALF_PRODUCTS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
"""Settings of `torch.backends.cuda.matmul` for 16-bit products."""


def _rounded(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_rounded(part) for part in value]
    if isinstance(value, Tensor) and value.dtype == torch.float32:
        return value.bfloat16().float()
    return value


@of_process
@contextmanager
def _medium_precision(device: torch.device) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _matmul_precision(device: torch.device) -> Iterator[None]:
    rounded = _RoundedFactors() if device.type == "cpu" else nullcontext()
    with _medium_precision(device), rounded:
        yield


@of_process
@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Also fill memory that is not initialized with NaN, which torch does by default then."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@of_process
@contextmanager
def _threads(device: torch.device) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@of_process
@contextmanager
def _quiet_interpreter(device: torch.device) -> Iterator[None]:
    """Apply no mode of numpy to kernels in Triton's interpreter, which computes with numpy."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    launch = interpreter.GridExecutor.__call__

    def launch_quietly(*args: Any, **kwargs: Any) -> Any:
        # filters of warnings are those of all threads, numpy's errors those of one
        with np.errstate(all="ignore"):
            return launch(*args, **kwargs)

    with patch.object(interpreter.GridExecutor, "__call__", launch_quietly):
        yield


@contextmanager
def _numpy_errors(device: torch.device) -> Iterator[None]:
    with _quiet_interpreter(device), np.errstate(all="raise"):
        yield


@of_process
@contextmanager
def _warnings(device: torch.device) -> Iterator[None]:
    with _quiet_interpreter(device), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@of_process
@contextmanager
def _half_products(device: torch.device) -> Iterator[None]:
    products: Any = torch.backends.cuda.matmul
    before = {name: getattr(products, name) for name in HALF_PRODUCTS}
    try:
        for name, value in before.items():
            setattr(products, name, not value)
        yield
    finally:
        for name, value in before.items():
            setattr(products, name, value)


@of_process
@contextmanager
def _seed(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng([]):
        torch.manual_seed(12345)
        yield


@contextmanager
def _stream(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    cuda: Any = torch.cuda
    own, other = cuda.current_stream(device), cuda.Stream(device)
    other.wait_stream(own)
    with cuda.stream(other):
        yield
    own.wait_stream(other)


MODES: dict[str, Mode] = {
    "torch.device('meta') as the default": lambda device: torch.device("meta"),
    "torch.set_default_dtype(torch.float16)": _default_dtype,
    "torch.autocast in bfloat16": _autocast,
    "torch.set_float32_matmul_precision('medium')": _matmul_precision,
    "other settings of 16-bit products": _half_products,
    "torch.use_deterministic_algorithms(True)": _deterministic,
    "torch.no_grad()": lambda device: torch.no_grad(),
    "torch.set_num_threads": _threads,
    "torch.manual_seed": _seed,
    "numpy.errstate(all='raise')": _numpy_errors,
    "warnings as errors": _warnings,
    "another stream": _stream,
}
"""Global modes, by what a report calls them."""


@contextmanager
def entered(names: Sequence[str], device: torch.device) -> Iterator[None]:
    """Enter some modes."""
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(MODES[name](device))
        yield
