"""nvfp4_4over6: nvfp4 with the better of two scales per block. Reading is the same.

No code means a number between 4 and 6. So the element of the largest size of a block becomes 6 or
4, whichever makes the sum of the squared errors of the block smaller.
"""

import torch
from torch import Tensor

from .nvfp4 import in_pairs, into_blocks, meaning, measure, nearest_codes
from .nvfp4 import load as load


def store(numbers: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the codes of numbers, and the scale of each block.

    Codes and scales are those of nvfp4 for one of the two largest codes, 6 if both have the same
    error. So it is in a block with an infinite element, where both scales are 448.

    Args:
        numbers: [..., heads, head_size].
        scale: The global scale.

    Returns:
        [..., heads, head_size / 2] uint8, and [..., heads, head_size / 16] float8_e4m3fn.

    Source:
        Cook et al., "Four Over Six", 2025.

    Example:
        With the scale 1 the nearest number to 4.8 is 4. With the scale 1.5 it is 4.5.

        >>> row = torch.tensor([[6.0, *[4.8] * 15]])
        >>> codes, scales = store(row, 1.0, torch.uint8)
        >>> load(codes, scales, torch.float32)[0, :2], float(scales)
        (tensor([6.0000, 4.5000]), 1.5)
    """
    blocks = into_blocks(numbers.float())
    for_six, for_four = measure(blocks, scale, 6.0), measure(blocks, scale, 4.0)
    takes_four = error(blocks, for_four, scale) < error(blocks, for_six, scale)
    pair = for_four.view(torch.uint8), for_six.view(torch.uint8)
    scales = torch.where(takes_four, *pair).view(torch.float8_e4m3fn)
    return in_pairs(nearest_codes(blocks, scales, scale)), scales


def error(blocks: Tensor, scales: Tensor, scale: float) -> Tensor:
    """Return the sum of the squared errors of each block, in units of the global scale.

    The sum adds pairs of neighbours, then pairs of these sums, and so on. So every implementation
    rounds it alike. NaN has no error.

    Args:
        blocks: [..., blocks, 16] float32.
        scales: [..., blocks] float8_e4m3fn.
        scale: The global scale.
    """
    codes = nearest_codes(blocks, scales, scale)
    found = meaning(codes, torch.float32) * scales.float()[..., None]
    # on a GPU torch divides by a Python number by multiplying with its inverse, so use a tensor
    off = blocks / torch.tensor(scale, device=blocks.device) - found
    sums = off.where(~off.isnan(), 0.0).square()
    while sums.shape[-1] > 1:
        sums = sums[..., ::2] + sums[..., 1::2]
    return sums[..., 0]
