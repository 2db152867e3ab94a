"""Supported versions of triton: the reason why it is missing, and a repair of its interpreter.

Nothing here imports triton.
"""

import platform
import sys
from functools import cache
from typing import Any

import numpy

from ..contract.tested_versions import TRITON_RANGE as TRITON_RANGE
from ..contract.tested_versions import release as release

MACHINES = ("x86_64", "aarch64")
"""Machines for which the index has triton's wheels, on Linux."""


def why_no_triton() -> str:
    """Return the sentence for a machine on which triton is not installed."""
    system, machine = platform.system(), platform.machine()
    reference = "pagetwin.reference has the same functions and runs anywhere"
    if system == "Linux" and machine in MACHINES:
        return (
            f"pagetwin.optimized needs triton {TRITON_RANGE}, which is not installed:"
            f" pip install 'triton>=3.6,<3.10'; {reference}"
        )
    return (
        f"pagetwin.optimized needs triton {TRITON_RANGE}, which has wheels for Linux on"
        f" {' and '.join(MACHINES)} only (here: {system} on {machine}); {reference}"
    )


def repair_loaded_interpreter() -> None:
    """Repair Triton's interpreter if a kernel has been defined for it in this process."""
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        repair_interpreter(interpreter)


@cache
def repair_interpreter(interpreter: Any) -> None:
    """Correct two faults of Triton's interpreter, in the versions that have them.

    - Triton 3.6 beside numpy 2.4 or newer: a number is held as an array of one element, and
      `int(array)` raises "only 0-dimensional arrays can be converted to Python scalars". A loop
      whose bound was loaded cannot run.
    - Triton 3.9: the result of a comparison of two numbers becomes an array of int32 when it is
      combined with a mask, and a load with that mask raises "mask has unsupported dtype".

    Args:
        interpreter: the module `triton.runtime.interpreter`, modified in place.

    Source:
        https://github.com/triton-lang/triton/issues/9171 for the first fault.
    """
    triton = release(interpreter.triton.__version__)
    if triton == (3, 6) and release(numpy.__version__) >= (2, 4):
        _let_arrays_be_loop_bounds(interpreter)
    if triton == (3, 9):
        _keep_booleans(interpreter)


def _let_arrays_be_loop_bounds(interpreter: Any) -> None:
    replace_methods = interpreter._patch_lang_tensor

    def replace_methods_and_index(tensor: Any, scope: Any) -> None:
        replace_methods(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = replace_methods_and_index


def _keep_booleans(interpreter: Any) -> None:
    builder = interpreter.InterpreterBuilder
    create_splat = builder.create_splat

    def create_splat_of_same_dtype(self: Any, block: Any, number: Any) -> Any:
        if number.data.dtype == numpy.bool_:
            number = interpreter.TensorHandle(number.data, interpreter.tl.int1)
        return create_splat(self, block, number)

    builder.create_splat = create_splat_of_same_dtype
