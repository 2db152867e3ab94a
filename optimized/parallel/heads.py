"""Tensor parallelism over heads: the query heads and KV heads of each rank."""

from ...reference.parallel.heads import get_dcp_groups, get_tp_heads

__all__ = ["get_dcp_groups", "get_tp_heads"]
