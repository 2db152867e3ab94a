"""Launch of the combine kernel on the partial results that a rank has received."""

import torch
import triton
from torch import Tensor

from ...contract.parallel import RankBatch
from ..kernels.combine_ranks import Received, combine_ranks_kernel
from ..kernels.merge import State
from .launcher import check_launch, must_widen


def combine_received(
    received: Tensor,
    order: Tensor,
    batch: RankBatch,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> Tensor:
    """Combine partial results by log-sum-exp, and return `out`.

    Args:
        received: [ranks, heads, splits, tokens, elements] float32; a row has its values, its
            log-sum-exp, and padding.
        order: [ranks * splits] int64, where each partial result is, as rank * splits + split.
        batch: That of the step.
        sinks: [heads] one more score per head. Optional. If None, there are none.
        out: [tokens, heads, value_head_size], modified in place.
        lse: Optional. [heads, tokens], modified in place.
    """
    check_launch(received)
    tokens, heads, value_size = out.shape
    if not out.numel():
        return out
    upcast = must_widen(out.dtype)
    target = torch.empty_like(out, dtype=torch.float32) if upcast else out
    rank, head, split, token, _ = received.stride()
    lse_strides = (0, 0) if lse is None else lse.stride()
    parts = State(received, received[..., value_size], token, head, 1, head, token)
    combine_ranks_kernel[(tokens, heads)](
        Received(parts, order, batch.splits, rank, split),
        len(order),
        State(target, lse, *target.stride(), *lse_strides),
        None if sinks is None else sinks.contiguous(),
        batch.is_token,
        HEAD_DIM=value_size,
        BLOCK_D=triton.next_power_of_2(value_size),
    )
    return out.copy_(target) if upcast else out
