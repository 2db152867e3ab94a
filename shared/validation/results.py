"""Validation of results that the caller gives: dtypes, and memory that nothing else has."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..contract.cache_formats import TENSOR_SCALE_DTYPES
from .memory import check_results_apart
from .primitives import FLOATS, check_dtype

LSE_DTYPES = (torch.float32, torch.float64)


def check_results(
    out: Tensor | None,
    lse: Tensor | None,
    read: Mapping[str, Tensor | None],
    takes_fp8: bool = False,
) -> None:
    """Raise if an output or a log-sum-exp has another dtype, or memory that is read or written.

    Args:
        out: Optional. The output.
        lse: Optional. The log-sum-exps.
        read: Tensors that the call reads, by the names of their arguments.
        takes_fp8: Whether an output may be FP8.

    Raises:
        TypeError: A dtype is not the expected one.
        ValueError: Two elements have one address.
    """
    if out is not None:
        check_dtype("out", out, *FLOATS, *(TENSOR_SCALE_DTYPES if takes_fp8 else ()))
    if lse is not None:
        check_dtype("lse", lse, *LSE_DTYPES)
    check_results_apart({"out": out, "lse": lse}, read)
