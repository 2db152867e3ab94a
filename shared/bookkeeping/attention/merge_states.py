"""Conversion of log-sum-exps from base 2 to base e."""

import math

from ...contract.shapes import AnyLogSumExp
from ...validation.merge import check_lse


def log2_lse_to_ln(lse: AnyLogSumExp) -> AnyLogSumExp:
    """Return log-sum-exps of base 2 as natural ones.

    Args:
        lse: float32 or float64, in any shape, logarithms to base 2: what kernels that compute
            with powers of 2 leave.

    Returns:
        A new tensor of the same shape and dtype; what is infinite stays so.

    Raises:
        TypeError: another dtype.

    Source:
        vLLM's function of that name.

    Example:
        >>> log2_lse_to_ln(torch.tensor([0.0, 1.0, float("-inf")]))
        tensor([0.0000, 0.6931,   -inf])
    """
    check_lse(lse)
    return lse * math.log(2)
