"""A kernel that stores numbers in FP8."""

import torch
import triton
import triton.language as tl
from pagetwin.optimized.kernels.fp8 import PLAIN_SCALES
from pagetwin.optimized.kernels.fp8 import quantise as quantise_in_kernel
from torch import Tensor


@triton.jit
def quantise_kernel(
    numbers, scales, codes, size, IS_E5M2: tl.constexpr, NATIVE: tl.constexpr,
    IS_NUMBER: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    loaded = tl.load(numbers + at, mask=at < size, other=0.0)
    its = tl.load(scales + at, mask=at < size, other=1.0)
    scale = tl.load(scales) if IS_NUMBER else its
    made = quantise_in_kernel(loaded, scale, IS_E5M2, NATIVE, IS_NUMBER)
    tl.store(codes + at, made, mask=at < size)


def scales() -> Tensor:
    """Return scales of every exponent, some with the longest mantissas."""
    exponents = torch.arange(-126, 128, dtype=torch.float32)
    least, most = (float(torch.tensor(bound)) for bound in PLAIN_SCALES.value)
    drawn = 1 + torch.rand(2048, generator=torch.Generator().manual_seed(1))
    shifts = torch.arange(2048) % 12 - 8
    return torch.cat(
        [
            exponents.exp2(),
            exponents.exp2() * 1.9999998807907104,
            drawn * shifts.float().exp2(),
            torch.tensor([least, most, 1e-45, 1e-40, 0.1, 1 / 3, 448.0, 0.007]),
        ]
    )
