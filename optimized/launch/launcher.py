"""Launches of Triton kernels: the interpreter's rules, and a launcher with low host cost."""

import copy
import inspect
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
from torch import Tensor

from ...engine.triton_versions import repair_loaded_interpreter

RUNTIME = triton.knobs.runtime
INTERPRETED: bool = RUNTIME.interpret
DIRECT_LAUNCH: bool = os.environ.get("PAGETWIN_DIRECT_LAUNCH") == "1"
"""Whether calls are repeated and launches skip Triton's launcher. Off until a GPU has shown it."""
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


MakeMaps: TypeAlias = Callable[[int, int, int, int], Sequence[Any]]
"""Returns the encoded tensor maps for the addresses of queries, keys, values and the output."""


class DirectLaunch(NamedTuple):
    """The driver launch of one compiled kernel.

    Triton's launcher object is a Python function around it, which allocates scratch memory and
    packs the arguments again. A kernel without scratch memory does not need it: a launch takes 1.4
    instead of 3.1 us (minimum of 15 x 2,000, two-core machine, the driver replaced by a stub).

    Args:
        function: the C function.
        fixed: its arguments between the stream and the kernel's arguments.
        packs: whether it takes the kernel's arguments as one tuple (triton 3.7), not as arguments
            of its own (triton 3.6).
        device: index of the device on which the kernel is loaded.
    """

    function: Callable[..., None]
    fixed: tuple[Any, ...]
    packs: bool
    device: int

    def start(
        self, grid: tuple[int, int, int], stream: int, arguments: tuple[Any, ...]
    ) -> None:
        """Launch the kernel.

        Args:
            grid: programs along each axis.
            stream: raw handle.
            arguments: all arguments of the kernel in order, constants too. A tensor is given as its
                address, a tensor descriptor as its encoded tensor map, sizes and strides.
        """
        if self.packs:
            self.function(*grid, stream, *self.fixed, arguments)
        else:
            self.function(*grid, stream, *self.fixed, *arguments)


def find_direct_launch(compiled: Any, device: int) -> DirectLaunch | None:
    """Return the driver launch of a kernel that Triton has compiled and loaded.

    Without DIRECT_LAUNCH it is the call of Triton's launcher object.

    Args:
        compiled: the kernel.
        device: index of the device on which it is loaded.

    Returns:
        None if the kernel needs scratch memory, or this version of Triton is not known, which a
        log message says once. The kernel is then always launched through Triton.
    """
    run = compiled.run
    if not DIRECT_LAUNCH:
        if getattr(compiled.metadata, "tensordesc_meta", None):
            run = _with_ready_maps(run)
        of_kernel = (compiled.function, compiled.packed_metadata, None, None, None)
        return run and DirectLaunch(run, of_kernel, packs=False, device=device)
    known = ("launch", "launch_cooperative_grid", "launch_pdl")
    scratch = ("global_scratch_size", "profile_scratch_size")
    launch = getattr(run, "launch", None)
    if launch is not None and inspect.isfunction(launch):
        # a function that encodes all tensor maps at each launch; the launch is in its closure
        launch = inspect.getclosurevars(launch).nonlocals.get("launcher")
    version = tuple(triton.__version__.split(".")[:2])
    if (
        launch is None
        or version not in (("3", "6"), ("3", "7"))
        or not all(hasattr(run, name) for name in (*known, *scratch))
    ):
        _log_slow_launches(triton.__version__)
        return None
    if any(getattr(run, name) for name in scratch):
        return None
    function, metadata = compiled.function, compiled.packed_metadata
    options = (function, run.launch_cooperative_grid, run.launch_pdl)
    no_hooks = no_scratch = (None, None)
    if version == ("3", "6"):
        before = (*options, *no_scratch, metadata, None, *no_hooks)
        return DirectLaunch(launch, before, packs=False, device=device)
    annotations = (run.arg_annotations, run.kernel_signature)
    fixed = (*options, metadata, None, *no_hooks, *no_scratch, *annotations)
    return DirectLaunch(launch, fixed, packs=True, device=device)


def _with_ready_maps(run: Any) -> Any:
    """Return the launcher object of a kernel whose tensor maps are encoded already.

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


@cache
def _log_slow_launches(version: str) -> None:
    logging.getLogger(__name__).warning(
        "the launch function of triton %s is not known: every launch goes through Triton, which"
        " takes several times as long on the host",
        version,
    )


@dataclass(frozen=True)
class LaunchNote:
    """One direct launch of a call that is recorded, see repeat/calls.py.

    Args:
        direct: the launch of the compiled kernel.
        grid: programs along each axis.
        make_maps: Optional. Returns the encoded tensor maps for other addresses of queries, keys,
            values and the output. None for a kernel without tensor maps.
        pointers: addresses.
        options: option values: tensors, numbers and None.
        rest: all other arguments.
        is_grouped: whether pointers and options are a tuple each.
    """

    direct: DirectLaunch
    grid: tuple[int, int, int]
    make_maps: MakeMaps | None
    pointers: tuple[int, ...]
    options: tuple[Any, ...]
    rest: tuple[Any, ...]
    is_grouped: bool


class Recording(threading.local):
    """What the calls of this thread do, if they are recorded.

    Attributes:
        notes: launches and requests for workspace in their order; None in place of a launch
            that cannot be repeated. If `notes` is None, nothing is recorded.
    """

    notes: list[Any] | None = None


RECORDING = Recording()


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
    ) -> None:
        self._kernel = kernel
        self._lower = lower
        self._fixed = fixed
        self._groups = groups
        self._no_options = () if groups is None else (None,) * len(groups[1]._fields)
        self._chosen = {"num_warps": num_warps, "num_stages": num_stages}
        if is_dependent:
            self._chosen["launch_pdl"] = True
        self._rest: tuple[Any, ...] = ()
        self._compiled: Any = None
        self._direct: DirectLaunch | None = None
        self._map_kinds: Sequence[Any] = ()

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return str(self._kernel.__name__)

    @property
    def is_ready(self) -> bool:
        """Whether a launch was made before, so that the driver launch is known."""
        return self._direct is not None

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
        make_maps: MakeMaps | None = None,
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
            and not union & 15
            and current_device() == direct.device
            and (maps or not self._map_kinds)
            and not is_profiled()
        ):
            # the driver launch takes plain tuples; only Triton's specialization needs NamedTuples
            changing = (pointers, options) if is_grouped else (*pointers, *options)
            rest = (*numbers, *self._rest)
            if notes is not None and maps and make_maps is None:
                notes.append(None)
            elif notes is not None:
                notes.append(
                    LaunchNote(
                        direct, grid, make_maps, tuple(pointers),
                        tuple(options), rest, is_grouped,
                    )
                )  # fmt: skip
            stream = current_stream(direct.device)
            direct.start(grid, stream, (*maps, *changing, *rest))
            return
        if notes is not None:
            notes.append(None)
        lowered = self._lower(*tensors)
        if self._groups is None:
            arguments: tuple[Any, ...] = (*lowered, *options, *numbers)
        else:
            of_pointers, of_options = self._groups
            arguments = (of_pointers(*lowered), of_options(*options), *numbers)
        names = self._kernel.arg_names[len(arguments) :]
        self._rest = tuple(self._fixed.get(name) for name in names)
        compiled = self._kernel[grid](*arguments, *self._rest, **self._chosen)
        if compiled is not None and not union & 15 and not INTERPRETED:
            self._map_kinds = getattr(compiled.metadata, "tensordesc_meta", None) or ()
            # the kernel stays loaded as long as it is referenced
            self._compiled = compiled
            self._direct = find_direct_launch(compiled, current_device())
