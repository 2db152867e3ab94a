"""Where and how do the kernels run?"""

import torch
import triton
from torch import Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret
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


def must_widen(dtype: torch.dtype) -> bool:
    """Tell whether a kernel has to compute in float32 what it would compute in `dtype`.

    The interpreter holds bfloat16 as bare 16-bit patterns: its arithmetic is wrong and its
    stores cut off instead of rounding. So there a kernel widens what it loads, and writes into
    a float32 buffer that torch rounds.
    """
    return INTERPRETED and dtype == torch.bfloat16
