"""Tensor parallelism over heads: the query heads and KV heads of each rank.

Heads do not depend on each other, so each rank computes some of them and nothing is exchanged. The
KV heads are distributed like the query heads that read them. With more ranks than KV heads, several
ranks store copies of the same one. Decode context parallelism removes the copies: these ranks form
a group, and each stores a share of the keys instead of all of them.
"""

from ...contract.argument_types import typed
from ...contract.parallel import RankHeads
from ...validation.parallel import check_dcp_groups, check_tp_heads


@typed
def get_tp_heads(
    num_query_heads: int, num_kv_heads: int, tp_world_size: int, tp_rank: int
) -> RankHeads:
    """Return the heads of one rank.

    Args:
        num_query_heads, num_kv_heads: heads of the layer, on all ranks together.
        tp_world_size: number of ranks, a divisor of `num_query_heads`. A divisor or a multiple of
            `num_kv_heads`.
        tp_rank: this rank.

    Raises:
        ValueError: heads do not divide, or the rank does not exist.

    Source:
        vLLM's `QKVParallelLinear` (`num_kv_head_replicas`).

    Example:
        Eight query heads read two KV heads. Ranks 2 and 3 of four both store KV head 1.

        >>> get_tp_heads(num_query_heads=8, num_kv_heads=2, tp_world_size=4, tp_rank=3)
        RankHeads(query_start=6, query_stop=8, kv_start=1, kv_stop=2, copies=2)
    """
    check_tp_heads(num_query_heads, num_kv_heads, tp_world_size, tp_rank)
    # step: give each rank consecutive query heads
    heads = num_query_heads // tp_world_size
    # step: give it the KV heads that these read
    copies = max(1, tp_world_size // num_kv_heads)
    kv_heads = max(1, num_kv_heads // tp_world_size)
    kv_start = tp_rank // copies * kv_heads
    return RankHeads(
        query_start=tp_rank * heads,
        query_stop=(tp_rank + 1) * heads,
        kv_start=kv_start,
        kv_stop=kv_start + kv_heads,
        copies=copies,
    )


@typed
def get_dcp_groups(
    num_kv_heads: int, tp_world_size: int, dcp_world_size: int
) -> list[list[int]]:
    """Return the groups of ranks that share the keys of the same KV heads.

    Args:
        num_kv_heads: heads of the layer, on all ranks together.
        tp_world_size: ranks over which the heads are distributed.
        dcp_world_size: ranks of a group, a divisor of the copies of each KV head.

    Returns:
        The ranks of each group, in order. `torch.distributed.new_group` takes one of them.

    Raises:
        ValueError: a group would have ranks with different KV heads.

    Source:
        vLLM's `initialize_model_parallel`.

    Example:
        >>> get_dcp_groups(num_kv_heads=2, tp_world_size=8, dcp_world_size=2)
        [[0, 1], [2, 3], [4, 5], [6, 7]]
    """
    check_dcp_groups(num_kv_heads, tp_world_size, dcp_world_size)
    # step: put consecutive ranks into one group
    return [
        list(range(first, first + dcp_world_size))
        for first in range(0, tp_world_size, dcp_world_size)
    ]
