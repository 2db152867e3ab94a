"""Compilation of several kernels at once, before they are launched.

Triton compiles a kernel at its first launch, in the thread that launches it. Nine tenths of that
time are spent in MLIR, LLVM and the assembler, which do not hold Python's global lock. So threads
compile several kernels at once. Only the part in Python, which traces a kernel, is sequential.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import Context
from functools import partial
from typing import Any, TypeVar

import torch
import triton

from .launcher import INTERPRETED, RECORDING, current_device

MAX_THREADS = 16
"""Threads, at most, if their number is not given: with more, Python's global lock is the limit."""

_Result = TypeVar("_Result")


def count_threads() -> int:
    """Return the default number of threads: the CPUs that this process may use, at most 16."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def launch_compiled(
    launch: Callable[[], _Result], num_threads: int, device: torch.device
) -> _Result:
    """Call a function whose launches first compile in several threads, and return its result.

    With several threads on a CUDA device, the function is called twice. The first call compiles the
    kernels and launches none. The second call launches them. The result is that of the first call.

    Args:
        launch: makes the same launches whenever it is called, whatever they compute. It may launch
            through `Launcher` and `launch_kernel`.
        num_threads: threads that compile, at least 1. With 1, a launch compiles its kernel.
        device: device of the launches, which is the current one.

    Raises:
        Exception: what `launch` raises. A kernel that cannot be compiled makes its launch in the
            second call raise the error, as it would without threads.
    """
    if num_threads == 1 or INTERPRETED or device.type != "cuda":
        return launch()
    # triton's mode is a context variable: here it ends with the call, whatever is raised
    result = Context().run(_compile, launch, num_threads)
    launch()
    return result


def _compile(launch: Callable[[], _Result], num_threads: int) -> _Result:
    """Call a function without launching its kernels, and wait until they are compiled."""
    with ThreadPoolExecutor(num_threads, "pagetwin-compile") as pool:
        threads = _Threads(pool, current_device())
        try:
            # the launch that needs a kernel raises the errors of its compilation
            with triton.AsyncCompileMode(threads, ignore_errors=True):
                RECORDING.compiles_only, RECORDING.notes = True, deque(maxlen=0)
                try:
                    return launch()
                except BaseException:
                    threads.cancel()
                    raise
                finally:
                    RECORDING.compiles_only, RECORDING.notes = False, None
        finally:
            threads.end()


class _Compilation(Future[Any]):
    """One compilation in another thread.

    Triton keeps this object for a kernel whose compilation failed or was cancelled. The launch of
    such a kernel asks for the result again, and compiles then.

    Args:
        compile_kernel: returns the compiled kernel.
        device: index of the device for which it is compiled.
    """

    def __init__(self, compile_kernel: Callable[[], Any], device: int) -> None:
        super().__init__()
        self._compile_kernel, self._device = compile_kernel, device
        self.is_repeated = False

    def compile(self) -> None:
        """Compile the kernel, unless this was cancelled."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            # each thread has a current device of its own
            torch.cuda.set_device(self._device)
            compiled = self._compile_kernel()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(compiled)

    def result(self, timeout: float | None = None) -> Any:
        """Return the compiled kernel, or raise what its compilation raised."""
        if self.is_repeated and (self.cancelled() or self.exception() is not None):
            return self._compile_kernel()
        return super().result(timeout)


class _Threads(Executor):
    """What Triton submits its compilations to.

    Args:
        pool: the threads.
        device: index of the current device of the launches.
    """

    def __init__(self, pool: ThreadPoolExecutor, device: int) -> None:
        self._pool, self._device = pool, device
        self._submitted: list[_Compilation] = []

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Return a compilation that a thread will do."""
        compilation = _Compilation(partial(fn, *args, **kwargs), self._device)
        self._submitted.append(compilation)
        self._pool.submit(compilation.compile)
        return compilation

    def cancel(self) -> None:
        """Cancel what no thread has begun."""
        for compilation in self._submitted:
            compilation.cancel()

    def end(self) -> None:
        """Let launches repeat the compilations that failed; cancel what no thread has begun."""
        self.cancel()
        for compilation in self._submitted:
            compilation.is_repeated = True
