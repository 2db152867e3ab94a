"""Launches of Triton kernels: the interpreter's rules, and a launcher with low host cost."""

import inspect
import threading
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor

from ...engine.rank_waits import wait_for_ranks
from ...engine.triton_versions import repair_loaded_interpreter
from .direct_launch import DirectLaunch, find_direct_launch

RUNTIME = triton.knobs.runtime
INTERPRETED: bool = RUNTIME.interpret
"""Whether kernels run in Triton's interpreter, on any tensor, or compiled, on CUDA tensors."""

SET_TOO_LATE = INTERPRETED and isinstance(triton.language.cdiv, triton.JITFunction)
"""Whether TRITON_INTERPRET was set after triton's own functions were made, to be compiled."""


def check_launch(tensor: Tensor) -> None:
    """Reject a tensor that compiled kernels cannot read; repair the interpreter if it is used.

    Raises:
        RuntimeError: the interpreter was switched on after triton was imported.
        ValueError: a tensor that is not on a CUDA device while the interpreter is off.
    """
    if SET_TOO_LATE:
        raise RuntimeError(
            "TRITON_INTERPRET = 1 was set after triton was imported: expected it in the"
            " environment before Python starts, as models of transformers import triton; or use"
            " pagetwin.reference"
        )
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


MakeMaps: TypeAlias = Callable[[int, int, int, int], Sequence[Any]]
"""Returns the encoded tensor maps for the addresses of queries, keys, values and the output."""


@dataclass(frozen=True)
class LaunchNote:
    """One direct launch of a call that is recorded, see repeat/calls.py.

    Args:
        direct: the launch of the compiled kernel.
        grid: programs along each axis.
        make_maps: Optional. Returns the encoded tensor maps for other addresses of the tensors at
            `map_addresses`. None for a kernel without tensor maps.
        map_addresses: addresses of queries, keys, values and the output, for which the tensor maps
            were made. Empty if they are those of the call.
        pointers: addresses.
        options: option values: tensors, numbers and None.
        rest: all other arguments.
        is_grouped: whether pointers and options are a tuple each.
    """

    direct: DirectLaunch
    grid: tuple[int, int, int]
    make_maps: MakeMaps | None
    map_addresses: tuple[int, ...]
    pointers: tuple[int, ...]
    options: tuple[Any, ...]
    rest: tuple[Any, ...]
    is_grouped: bool


class Recording(threading.local):
    """What the calls of this thread do, if they are recorded.

    Attributes:
        notes: launches and requests for workspace in their order; None in place of a launch
            that cannot be repeated. If `notes` is None, nothing is recorded.
        compiles_only: whether kernels are compiled instead of launched, see compile_ahead.py.
            `notes` is not None then, and keeps nothing. Repeated calls and writes, whose kernels
            are all compiled, are launched.
    """

    notes: MutableSequence[Any] | None = None
    compiles_only: bool = False


RECORDING = Recording()


def launch_kernel(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any
) -> Any:
    """Launch a Triton function, or only compile it if this thread's launches do that.

    Args:
        kernel: the function.
        grid: programs along each axis.
        arguments, named: as the function takes them, and launch options.

    Returns:
        the compiled kernel. None if it was not launched, or runs in the interpreter.
    """
    if RECORDING.compiles_only:
        kernel.warmup(*arguments, grid=grid, **named)
        return None
    return kernel[grid](*arguments, **named)


@cache
def _find_encoder() -> tuple[Callable[..., list[Any]], tuple[None, ...]]:
    """Return Triton's function that encodes a tensor map, and its further arguments."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    # from triton 3.8 on it takes the launch's other arguments too, which it does not read
    return make_tensordesc_arg, (None,) * (
        len(inspect.signature(make_tensordesc_arg).parameters) - 2
    )


def bound_kernel_loads() -> None:
    """Let each load of a kernel wait for the collectives of a parallel step first.

    The driver may wait for the whole device when it loads a kernel, and has no time limit for that.
    """
    RUNTIME.kernel_load_start_hook.add(_wait_before_load)


def _wait_before_load(*of_kernel: Any) -> None:
    wait_for_ranks("a kernel is loaded")


def is_profiled() -> bool:
    """Return whether a profiler has hooks, which only a launch through Triton calls."""
    return bool(RUNTIME.launch_enter_hook.calls or RUNTIME.launch_exit_hook.calls)


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
        is_dependent: whether the launch is a programmatic dependent launch: it begins before the
            launch that precedes it on the stream has ended, and waits in the kernel.
        encodes_maps: whether tensor maps have boxes that Triton does not encode. All launches are
            driver launches then, and `load` must have returned True before each of them. The kernel
            must not be specialized on the alignment of pointers.
        registers: Optional. Registers of a thread, at most. If None, the compiler decides.
    """

    def __init__(
        self,
        kernel: Any,
        lower: Callable[..., Sequence[Any]],
        fixed: Mapping[str, Any],
        num_warps: int,
        num_stages: int,
        groups: tuple[Any, Any] | None = None,
        is_dependent: bool = False,
        encodes_maps: bool = False,
        registers: int | None = None,
    ) -> None:
        self._kernel = kernel
        self._lower = lower
        self._fixed = fixed
        self._groups = groups
        self._no_options = () if groups is None else (None,) * len(groups[1]._fields)
        self._chosen = {"num_warps": num_warps, "num_stages": num_stages}
        if is_dependent:
            self._chosen["launch_pdl"] = True
        if registers is not None:
            self._chosen["maxnreg"] = registers
        self._rest: tuple[Any, ...] = ()
        self._compiled: Any = None
        self._direct: DirectLaunch | None = None
        self._map_kinds: Sequence[Any] = ()
        self._encodes_maps = encodes_maps

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return str(self._kernel.__name__)

    @property
    def module(self) -> str:
        """The module of the kernel."""
        return str(self._kernel.fn.__module__)

    @property
    def is_ready(self) -> bool:
        """Whether a launch was made before, so that the driver launch is known."""
        return self._direct is not None

    def encode(self, number: int, descriptor: Any) -> list[Any]:
        """Return an encoded tensor map and its sizes and strides. The launcher must be ready.

        Args:
            number: index of the kernel's tensor map.
            descriptor: the tensor descriptor. If it has an attribute `true_box`, these are the
                first sizes of the box, in place of those of the kernel's type.
        """
        encode, others = _find_encoder()
        kind = self._map_kinds[number]
        true_box = getattr(descriptor, "true_box", None)
        if true_box is not None:
            columns = kind["block_size"][len(true_box) :]
            kind = {**kind, "block_size": [*true_box, *columns]}
        made: list[Any] = encode(descriptor, kind, *others)
        return made

    def load(
        self,
        options: Sequence[Tensor | float | None],
        numbers: Sequence[float],
        tensors: Sequence[Any],
    ) -> bool:
        """Compile and load the kernel without a launch, and return whether it can be launched.

        It cannot if Triton's driver launch or its tensor maps are not known. Launches that are only
        compiled, and those of the interpreter, need nothing.

        Args:
            options, numbers, tensors: as in `__call__`.
        """
        if INTERPRETED or RECORDING.compiles_only:
            return True
        if self._direct is None or current_device() != self._direct.device:
            arguments = self._order_arguments(options, numbers, tensors)
            compiled = self._kernel.warmup(*arguments, grid=(1, 1, 1), **self._chosen)
            if hasattr(compiled, "result"):  # it was compiled in another thread
                compiled = compiled.result()
            if compiled is not None:
                self._keep(compiled)
        return self._direct is not None and bool(self._map_kinds)

    def __call__(
        self,
        grid: tuple[int, int, int],
        pointers: Sequence[int],
        options: Sequence[Tensor | float | None] | None,
        numbers: Sequence[float],
        tensors: Sequence[Any],
        maps: Sequence[Any] = (),
        make_maps: MakeMaps | None = None,
        map_addresses: Sequence[int] = (),
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
            make_maps: Optional. Returns `maps` for other addresses, in calls that differ in nothing
                else. A launch with maps and without this function is not repeated.
            map_addresses: addresses of queries, keys, values and the output, for which `maps` were
                made. Empty if they are those of the call.
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
        is_grouped, direct = self._groups is not None, self._direct
        notes = RECORDING.notes
        if (
            direct is not None
            and (self._encodes_maps or not union & 15)
            and current_device() == direct.device
            and (maps or not self._map_kinds)
            # a plan with such maps has checked for a profiler when it was chosen
            and (self._encodes_maps or not is_profiled())
        ):
            # the driver launch takes plain tuples; only Triton's specialization needs NamedTuples
            changing = (pointers, options) if is_grouped else (*pointers, *options)
            rest = (*numbers, *self._rest)
            if notes is not None:
                if RECORDING.compiles_only:
                    return
                note = LaunchNote(
                    direct, grid, make_maps, tuple(map_addresses), tuple(pointers),
                    tuple(options), rest, is_grouped,
                )  # fmt: skip
                notes.append(None if maps and make_maps is None else note)
            stream = current_stream(direct.device)
            direct.start(grid, stream, (*maps, *changing, *rest))
            return
        if notes is not None:
            notes.append(None)
        # Triton's launch would encode other boxes
        assert not self._encodes_maps or INTERPRETED or RECORDING.compiles_only
        arguments = self._order_arguments(options, numbers, tensors)
        compiled = launch_kernel(self._kernel, grid, *arguments, **self._chosen)
        if compiled is not None and not union & 15 and not INTERPRETED:
            self._keep(compiled)

    def _order_arguments(
        self,
        options: Sequence[Tensor | float | None],
        numbers: Sequence[float],
        tensors: Sequence[Any],
    ) -> tuple[Any, ...]:
        """Return the arguments of a launch through Triton."""
        lowered = self._lower(*tensors)
        if self._groups is None:
            arguments: tuple[Any, ...] = (*lowered, *options, *numbers)
        else:
            of_pointers, of_options = self._groups
            arguments = (of_pointers(*lowered), of_options(*options), *numbers)
        names = self._kernel.arg_names[len(arguments) :]
        self._rest = tuple(self._fixed.get(name) for name in names)
        return (*arguments, *self._rest)

    def _keep(self, compiled: Any) -> None:
        """Note what driver launches of a compiled kernel need."""
        self._map_kinds = getattr(compiled.metadata, "tensordesc_meta", None) or ()
        # the kernel stays loaded as long as it is referenced
        self._compiled = compiled
        self._direct = find_direct_launch(compiled, current_device())
