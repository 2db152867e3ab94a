"""int4_per_token_head_vllm: int4_per_token_head as vLLM 0.33 writes it. Reading is the same.

The levels reach from the smallest to the largest number of a rotated row, and need not include 0.
The zero point stays between 0 and 15. So a rotated row whose numbers all have one sign is stored
with a wrong offset: [3, 0.01, 0, ...] is read as 0.02. It is here for caches that vLLM also writes.
"""

import torch
from torch import Tensor

from .int4_per_token_head import extremes, levels_between, rotate
from .int4_per_token_head import load as load


def store(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the codes of numbers, and the scale of each head with its zero point.

    Args:
        numbers: [..., heads, head_size].
        scale: Not read: it is measured.

    Returns:
        [..., heads, head_size / 2] uint8, and [..., heads] float32.

    Example:
        The row is rotated to 1 and 1, so the step is the smallest one and every level is 0.

        >>> codes, scale = store(torch.tensor([[1.0, 0.0]]), torch.ones(1), torch.uint8)
        >>> load(codes, scale, torch.float32)
        tensor([[0., 0.]])
    """
    # what float16 does not reach is infinite
    rotated = rotate(numbers).to(numbers.dtype).float()
    return levels_between(rotated, *extremes(rotated))
