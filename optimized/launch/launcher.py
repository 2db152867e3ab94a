"""Where and how do the kernels run?"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

RUNTIME = triton.knobs.runtime
INTERPRETED: bool = RUNTIME.interpret
"""Whether kernels run in Triton's interpreter, on any tensor, or compiled, on CUDA tensors."""


def check_launch(tensor: Tensor) -> None:
    """Refuse a tensor that compiled kernels cannot read.

    Raises:
        ValueError: a tensor outside CUDA while the interpreter is off.
    """
    if not INTERPRETED and tensor.device.type != "cuda":
        raise ValueError(
            f"the tensors lie on {tensor.device}: expected cuda. To run the kernels without a"
            " GPU, set TRITON_INTERPRET=1 before triton is imported; or use"
            " pagetwin.reference"
        )


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below a number from 1."""
    return 1 << (number - 1).bit_length()


def must_widen(dtype: torch.dtype) -> bool:
    """Tell whether a kernel has to compute in float32 what it would compute in `dtype`.

    The interpreter holds bfloat16 as bare 16-bit patterns: its arithmetic is wrong and its
    stores cut off instead of rounding. So there a kernel widens what it loads, and writes into
    a float32 buffer that torch rounds.
    """
    return INTERPRETED and dtype == torch.bfloat16


# what torch's public functions wrap, whose cost a launch would feel; absent without CUDA
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


class Launcher:
    """One kernel on arguments of one kind, of which some change from launch to launch.

    Triton looks at every argument of every launch to find the right compiled kernel, which costs
    more than the launch itself. Here the caller promises that all are of the kind of the first
    launch: the same dtypes, strides and constants. What it does not promise is looked at: pointers
    that are not aligned to 16 bytes, another device, and hooks of a profiler take Triton's way.

    Args:
        kernel: a function of triton, whose changing arguments come first: tensor maps, pointers,
            pointers or numbers of options, and numbers, which must not be specialised.
        lower: makes the kernel's tensors, and what its maps describe, of the tensors that a launch
            is given.
        fixed: arguments that never change, by name; those that are not named are None.
        num_warps, num_stages: of the launch.
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
        self._chosen = {"num_warps": num_warps, "num_stages": num_stages}
        self._rest: tuple[Any, ...] = ()
        self._run: Any = None
        self._function: Any = None
        self._metadata: Any = None
        self._device = -1
        self._map_kinds: Sequence[Any] = ()

    @property
    def is_ready(self) -> bool:
        """Whether a launch was made before, so that its kernel is known."""
        return self._run is not None

    def encode(self, number: int, descriptor: Any) -> list[Any]:
        """Return a tensor map and what goes with it, for a launch that is ready.

        Args:
            number: which of the kernel's maps it is.
            descriptor: what it describes.
        """
        from triton.backends.nvidia.driver import make_tensordesc_arg

        made: list[Any] = make_tensordesc_arg(descriptor, self._map_kinds[number])
        return made

    def __call__(
        self,
        grid: tuple[int, int, int],
        pointers: Sequence[int],
        options: Sequence[Tensor | float | None],
        numbers: Sequence[float],
        tensors: Sequence[Any],
        maps: Sequence[Any] = (),
    ) -> None:
        """Launch the kernel.

        Args:
            grid: programs along each axis.
            pointers: 0 for those that are absent.
            options: tensors and numbers of options.
            numbers: sizes and strides.
            tensors: what the pointers point to and the maps describe, before it is lowered.
            maps: of a kernel with maps, what `encode` returned for each; empty: not ready yet.
        """
        # Triton's launch takes plain tuples; only its specialization needs NamedTuples
        changing: tuple[Any, ...] = (pointers, options, *numbers)
        if self._groups is None:
            changing = (*pointers, *options, *numbers)
        union = 0
        for pointer in pointers:
            union |= pointer
        for option in options:
            if option is not None and not isinstance(option, float):
                union |= option.data_ptr()
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
    """Return what launches a kernel with tensor maps that are encoded already.

    Triton wraps the launch of such a kernel in a function that encodes all maps anew each time;
    beneath it lies the launch itself. None: it does not lie there, so each launch must go
    Triton's way.
    """
    if not inspect.isfunction(run.launch):
        return None
    beneath = inspect.getclosurevars(run.launch).nonlocals.get("launcher")
    if beneath is None:
        return None
    run = copy.copy(run)
    run.launch = beneath
    return run
