"""Direct launches: the driver launch of a compiled kernel, without Triton's launcher object."""

import copy
import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import triton


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

    If the kernel needs scratch memory, or this version of Triton is not known, it is the call of
    Triton's launcher object.

    Args:
        compiled: the kernel.
        device: index of the device on which it is loaded.

    Returns:
        None if that object does not take encoded tensor maps either, which a log message says once.
        The kernel is then always launched through Triton.
    """
    direct = _find_driver_launch(compiled, device)
    if direct is not None:
        return direct
    run = compiled.run
    if getattr(compiled.metadata, "tensordesc_meta", None):
        run = _with_ready_maps(run)
        if run is None:
            _log_slow_launches(triton.__version__)
            return None
    of_kernel = (compiled.function, compiled.packed_metadata, None, None, None)
    return DirectLaunch(run, of_kernel, packs=False, device=device)


def _find_driver_launch(compiled: Any, device: int) -> DirectLaunch | None:
    """Return the C function that launches a kernel; None if Triton's launcher is needed."""
    run = compiled.run
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
        or any(getattr(run, name) for name in scratch)
    ):
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
        "triton %s encodes all tensor maps at each launch: kernels with tensor maps go through"
        " Triton, which takes several times as long on the host",
        version,
    )
