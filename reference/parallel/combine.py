"""Exchange of partial results among ranks, and their combination by log-sum-exp."""

import torch

from ...contract.parallel import RankBatch
from ...engine.rank_group import RankGroup
from ..attention.merge_states import lse_weighted_combine
from ..attention.softmax import share_weight


def combine_received(
    ranks: RankGroup, outs: torch.Tensor, lses: torch.Tensor, order: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the combined rows of this rank's heads, from one packed exchange.

    Args:
        outs: [splits, tokens, ranks, heads, value_head_size].
        lses: [splits, tokens, ranks, heads].
        order: Index of each split among the partial results of rank 0, of rank 1, and so on.

    Returns:
        [tokens, heads, value_head_size], [tokens, heads].
    """
    packed = torch.cat([outs, lses[..., None]], dim=-1)
    received = ranks.all_to_all(packed.movedim(2, 0).contiguous())
    # [all splits, tokens, heads, value_head_size + 1]
    partials = received.flatten(0, 1)[torch.tensor(order, device=outs.device)]
    return lse_weighted_combine(partials[..., :-1], partials[..., -1])


def combine_while_adding(
    ranks: RankGroup, outs: torch.Tensor, lses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the combined rows of this rank's heads, whose collective adds weighted rows.

    Args:
        outs: [1, tokens, ranks, heads, value_head_size].
        lses: [1, tokens, ranks, heads].

    Returns:
        [tokens, heads, value_head_size], [tokens, heads].
    """
    # [ranks, tokens, ranks, heads], [tokens, ranks, heads]
    weights, joint = share_weight(ranks.all_gather(lses[0].contiguous()))
    weighted = (weights[ranks.rank][..., None] * outs[0]).movedim(1, 0)
    result = ranks.reduce_scatter(weighted.contiguous())
    return result, joint[:, ranks.rank]


def add_sinks(
    result: torch.Tensor,
    joint: torch.Tensor,
    sinks: torch.Tensor,
    batch: RankBatch,
) -> tuple[torch.Tensor, torch.Tensor]:
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
