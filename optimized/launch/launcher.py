"""Launches of Triton kernels: the interpreter's rules, and a launcher with low host cost."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ...engine.triton_versions import repair_loaded_interpreter

RUNTIME = triton.knobs.runtime
INTERPRETED: bool = RUNTIME.interpret
"""Whether kernels run in Triton's interpreter, on any tensor, or compiled, on CUDA tensors."""


def check_launch(tensor: Tensor) -> None:
    """Reject a tensor that compiled kernels cannot read; repair the interpreter if it is used.

    Raises:
        ValueError: a tensor that is not on a CUDA device while the interpreter is off.
    """
    if INTERPRETED:
        repair_loaded_interpreter()
    elif tensor.device.type != "cuda":
        raise ValueError(
            f"the tensors are on {tensor.device}: expected cuda. To run the kernels without a"
            " GPU, set TRITON_INTERPRET=1 before triton is imported; or use"
            " pagetwin.reference"
        )


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


def must_widen(dtype: torch.dtype) -> bool:
    """Return whether a kernel has to compute in float32 what it would compute in `dtype`.

    The interpreter holds bfloat16 as 16-bit patterns: its arithmetic is wrong, and its stores
    truncate instead of rounding. There a kernel upcasts what it loads, and writes to a float32
    buffer that torch rounds.
    """
    return INTERPRETED and dtype == torch.bfloat16


# what torch's public functions wrap; the wrappers cost as much as a launch. Absent without CUDA.
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


class Launcher:
    """One kernel with arguments of one specialization, some of which change per launch.

    Triton inspects every argument of every launch to find the compiled kernel, which costs more
    than the launch itself. Here the caller guarantees that all arguments have the specialization
    of the first launch: the same dtypes, strides and constants. What the caller does not
    guarantee is checked: pointers that are not aligned to 16 bytes, another device and a
    profiler's hooks make the launch go through Triton.

    Args:
        kernel: a Triton function. Its changing arguments come first: tensor maps, pointers,
            option values (pointers or numbers) and numbers, which must not be specialized.
        lower: converts the tensors of a launch to the kernel's tensors and tensor descriptors.
        fixed: constant arguments by name. Those that are not named are None.
        num_warps, num_stages: launch options.
        groups: Optional. NamedTuples in which the kernel takes its pointers and its options. If
            None, each is an argument of its own.
    """

    def __init__(
        self,
        kernel: Any,
        lower: Callable[..., Sequence[Any]],
        fixed: Mapping[str, Any],
        num_warps: int,
        num_stages: int,
        groups: tuple[Any, Any] | None = None,
    ) -> None:
        self._kernel = kernel
        self._lower = lower
        self._fixed = fixed
        self._groups = groups
        self._no_options = () if groups is None else (None,) * len(groups[1]._fields)
        self._chosen = {"num_warps": num_warps, "num_stages": num_stages}
        self._rest: tuple[Any, ...] = ()
        self._run: Any = None
        self._function: Any = None
        self._metadata: Any = None
        self._device = -1
        self._map_kinds: Sequence[Any] = ()

    @property
    def is_ready(self) -> bool:
        """Whether a launch was made before, so that the compiled kernel is known."""
        return self._run is not None

    def encode(self, number: int, descriptor: Any) -> list[Any]:
        """Return an encoded tensor map and its sizes and strides. The launcher must be ready.

        Args:
            number: index of the kernel's tensor map.
            descriptor: the tensor descriptor.
        """
        from triton.backends.nvidia.driver import make_tensordesc_arg

        # from triton 3.8 on it takes the launch's other arguments too, which it does not read
        others = len(inspect.signature(make_tensordesc_arg).parameters) - 2
        made: list[Any] = make_tensordesc_arg(
            descriptor, self._map_kinds[number], *(None,) * others
        )
        return made

    def __call__(
        self,
        grid: tuple[int, int, int],
        pointers: Sequence[int],
        options: Sequence[Tensor | float | None] | None,
        numbers: Sequence[float],
        tensors: Sequence[Any],
        maps: Sequence[Any] = (),
    ) -> None:
        """Launch the kernel.

        Args:
            grid: programs along each axis.
            pointers: addresses; 0 for tensors that are absent.
            options: Optional. Option values, tensors and numbers. If None, all are absent.
            numbers: sizes and strides.
            tensors: arguments of `lower`, for a launch through Triton.
            maps: what `encode` returned for each tensor map, one list after another. Empty if
                the kernel has none, or the launcher is not ready.
        """
        union = 0
        for pointer in pointers:
            union |= pointer
        if options is None:
            options = self._no_options
        else:
            for option in options:
                if option is not None and not isinstance(option, float):
                    union |= option.data_ptr()
        # Triton's launch takes plain tuples; only its specialization needs NamedTuples
        changing: tuple[Any, ...] = (pointers, options, *numbers)
        if self._groups is None:
            changing = (*pointers, *options, *numbers)
        if (
            self._run is not None
            and not union & 15
            and current_device() == self._device
            and not RUNTIME.launch_enter_hook.calls
        ):
            self._run(
                *grid,
                current_stream(self._device),
                self._function,
                self._metadata,
                None,
                None,
                None,
                *maps,
                *changing,
                *self._rest,
            )
            return
        lowered = self._lower(*tensors)
        if self._groups is None:
            changing = (*lowered, *options, *numbers)
        else:
            of_pointers, of_options = self._groups
            changing = (of_pointers(*lowered), of_options(*options), *numbers)
        names = self._kernel.arg_names[len(changing) :]
        self._rest = tuple(self._fixed.get(name) for name in names)
        compiled = self._kernel[grid](*changing, *self._rest, **self._chosen)
        if compiled is not None and not union & 15 and not INTERPRETED:
            self._map_kinds = getattr(compiled.metadata, "tensordesc_meta", None) or ()
            self._run, self._device = compiled.run, current_device()
            if self._map_kinds:
                self._run = _with_ready_maps(compiled.run)
            self._function = compiled.function
            self._metadata = compiled.packed_metadata


def _with_ready_maps(run: Any) -> Any:
    """Return the launch function of a kernel whose tensor maps are encoded already.

    Triton wraps the launch of a kernel with tensor maps in a function that encodes all maps at
    each launch. The wrapped function is in its closure.

    Returns:
        None if this version of Triton has no such closure. Each launch then goes through Triton.
    """
    if not inspect.isfunction(run.launch):
        return None
    wrapped = inspect.getclosurevars(run.launch).nonlocals.get("launcher")
    if wrapped is None:
        return None
    run = copy.copy(run)
    run.launch = wrapped
    return run
