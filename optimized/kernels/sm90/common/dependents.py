"""Programmatic dependent launches: the second one begins before the first one has ended."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .traits import warp_layout

LAUNCH_PTX = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, $1;")
WAIT_PTX = gl.constexpr("griddepcontrol.wait; mov.b32 $0, $1;")


@gluon.jit
def launch_dependents():
    """Let a dependent launch begin on the SMs that this launch leaves."""
    _run(LAUNCH_PTX)


@gluon.jit
def wait_for_launch_before():
    """Wait until the launch before this one has ended, if this one is a dependent launch."""
    _run(WAIT_PTX)


@gluon.jit
def _run(PTX: gl.constexpr):
    layout: gl.constexpr = warp_layout(gl.num_warps())
    gl.inline_asm_elementwise(
        PTX,
        "=r,r",
        [gl.full([32 * gl.num_warps()], 0, gl.int32, layout)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
