"""Output rows: what they hold before attention, and how results are written to them."""

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ..cache.formats.fp8 import quantise
from .requests.request import RequestView


def start_output(
    query: Tensor, value_size: int, out: Tensor | None, lse: Tensor | None
) -> Tensor:
    """Return the output, all 0, and fill the log-sum-exp with -inf.

    Args:
        query: [tokens, query_heads, head_size].
        value_size: Elements of a value.
        out: Optional. Modified in place. If None, a new tensor in the dtype of `query` is made.
        lse: Optional. [query_heads, tokens], modified in place.
    """
    if out is None:
        out = query.new_empty(*query.shape[:2], value_size)
    if lse is not None:
        lse.fill_(-torch.inf)
    return out.zero_()


def write_output(
    result: Tensor,
    result_lse: Tensor,
    out: Tensor,
    lse: Tensor | None,
    request: RequestView,
    options: AttentionOptions,
) -> None:
    """Write the rows of one request in the dtype of the output, FP8 with its scale.

    Args:
        result: [queries, query_heads, value_head_size].
        result_lse: [query_heads, queries].
        out, lse: Those of the batch, modified in place.
        request: Its rows are written.
        options: `out_scale` is used.
    """
    if options.out_scale is not None:
        result = quantise(result, options.out_scale, out.dtype)
    out[request.rows] = result.to(out.dtype)
    if lse is not None:
        lse[:, request.rows] = result_lse.to(lse.dtype)
