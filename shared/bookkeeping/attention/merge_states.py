"""Conversion of log-sum-exps from base 2 to base e."""

import math

from ...contract.shapes import AnyLogSumExp
from ...validation.merge import check_lse


def log2_lse_to_ln(lse: AnyLogSumExp) -> AnyLogSumExp:
    """Return log-sum-exps converted from base 2 to base e.

    Args:
        lse: float32 or float64 of any shape: base-2 logarithms, as computed by kernels that use
            exp2.

    Returns:
        A new tensor of the same shape and dtype. Infinite values do not change.

    Raises:
        TypeError: the dtype is not supported.

    Source:
        vLLM's function of that name.

    Example:
        >>> log2_lse_to_ln(torch.tensor([0.0, 1.0, float("-inf")]))
        tensor([0.0000, 0.6931,   -inf])
    """
    check_lse(lse)
    return lse * math.log(2)
