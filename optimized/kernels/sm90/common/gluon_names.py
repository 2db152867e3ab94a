"""Gluon's operations whose names differ between triton 3.6 and 3.9, under one name each."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# no version up to 3.9 exports a public name
from triton.language.core import _aggregate as aggregate

# triton 3.8 renamed them, and 3.9 removed the old names
HAS_NEW_NAMES = hasattr(tma, "async_load")
async_load = tma.async_load if HAS_NEW_NAMES else tma.async_copy_global_to_shared
async_store = tma.async_store if HAS_NEW_NAMES else tma.async_copy_shared_to_global
# `cp.async` has other names than TMA
copy_elements = getattr(async_copy, "async_load", None) or (
    async_copy.async_copy_global_to_shared
)
# triton 3.7 renamed it
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

__all__ = [
    "aggregate",
    "async_load",
    "async_store",
    "barrier",
    "copy_elements",
    "reinterpret",
    "warp_specialize",
]


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """Return a view of a shared-memory buffer. No bytes are moved.

    Triton 3.9 renamed the method.

    Args:
        buffer: a shared-memory descriptor.
        dtype, shape, layout: those of the view, which has as many bytes.
    """
    view = getattr(buffer, "reinterpret", None) or buffer._reinterpret
    return view(dtype, shape, layout, _semantic=_semantic)


@builtin
def warp_specialize(roles, num_warps, registers, _semantic=None, _generator=None):
    """Run roles in different warps, also roles that a function has as arguments.

    Args:
        roles: list of (function, tuple of arguments). The first runs in the warps of the launch.
        num_warps, registers: warps of each further role, and registers per thread.
    """
    functions = [getattr(role[0], "value", role[0]) for role in roles]
    pairs = [(body, role[1]) for body, role in zip(functions, roles, strict=True)]
    return gl.warp_specialize(
        pairs, num_warps, registers, _semantic=_semantic, _generator=_generator
    )
