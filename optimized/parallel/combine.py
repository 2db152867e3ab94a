"""Combination of the partial results of ranks: received ones in one launch, or added on the way."""

import torch
import triton
from torch import Tensor

from ...contract.parallel import RankBatch
from ...engine.rank_group import RankGroup
from ..attention.merge_states import lse_weighted_combine
from ..kernels.merge import State
from ..runtime.launcher import check_launch, launch_kernel, must_widen
from .kernels.combine_ranks import Partners, Received, combine_ranks_kernel

ROW_PADDING = 8
"""Elements after the values of a row: its log-sum-exp, and padding to 32 bytes, which TMA takes."""


def combine_received(
    received: Tensor,
    order: Tensor,
    batch: RankBatch,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    partners: Partners | None = None,
) -> Tensor:
    """Combine partial results by log-sum-exp, and return `out`.

    Args:
        received: [ranks, heads, splits, tokens, elements] float32; a row has its values, its
            log-sum-exp, and padding. With `partners`, what this rank has for each rank.
        order: [ranks * splits] int64, where each partial result is, as rank * splits + split.
        batch: That of the step.
        sinks: [heads] one more score per head. Optional. If None, there are none.
        out: [tokens, heads, value_head_size], modified in place.
        lse: Optional. [heads, tokens], modified in place.
        partners: Optional. The ranks, which exchange the partial results in the launch. If None,
            they have exchanged them.
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
    launch_kernel(
        combine_ranks_kernel,
        (tokens, heads),
        Received(order, batch.splits, rank, split),
        parts,
        len(order),
        State(target, lse, *target.stride(), *lse_strides),
        None if sinks is None else sinks.contiguous(),
        batch.is_token,
        partners,
        HEAD_DIM=value_size,
        BLOCK_D=triton.next_power_of_2(value_size),
        RANKS=0 if partners is None else len(received),
        # one warp finds without a barrier whether its words have arrived
        num_warps=4 if partners is None else 1,
    )
    return out.copy_(target) if upcast else out


def combine_while_adding(
    ranks: RankGroup, outs: Tensor, lses: Tensor, waits: bool
) -> tuple[Tensor, Tensor]:
    """Return the combined rows of this rank's heads, whose collective adds weighted rows.

    Args:
        outs: [tokens, ranks * heads, value_head_size].
        lses: [ranks * heads, tokens].
        waits: As in `RankGroup.all_gather`.

    Returns:
        [tokens, heads, value_head_size], [tokens, heads].
    """
    every = ranks.all_gather(lses.contiguous(), waits=waits)
    largest = every.amax(0)
    shift = largest.masked_fill(largest == -torch.inf, 0.0)
    # divided by their own sum, since the joint log-sum-exp is rounded
    total = torch.exp(every - shift).sum(0)
    joint = largest + total.log()
    weights = torch.exp(lses - shift) / total.clamp(min=1.0)
    weighted = weights[..., None] * outs.transpose(0, 1)
    heads = len(lses) // ranks.world_size
    result = ranks.reduce_scatter(
        weighted.view(ranks.world_size, heads, *weighted.shape[1:]), waits=waits
    )
    begin = ranks.rank * heads
    return result.transpose(0, 1), joint[begin : begin + heads].T


def add_sinks(
    result: Tensor, joint: Tensor, sinks: Tensor, batch: RankBatch
) -> tuple[Tensor, Tensor]:
    """Return rows and log-sum-exps with one more score per head, which has no value.

    Args:
        result, joint: [tokens, heads, value_head_size], [tokens, heads].
        sinks: [heads].
        batch: Its padding gets no sink.
    """
    sinks = torch.where(batch.is_token[:, None], sinks.to(joint.dtype), -torch.inf)
    return lse_weighted_combine(
        torch.stack([result, torch.zeros_like(result)]), torch.stack([joint, sinks])
    )
