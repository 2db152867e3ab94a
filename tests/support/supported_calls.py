"""A call that a kernel family supports, with other sizes, dtypes and options on demand."""

from functools import partial
from math import prod
from typing import Any

import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.runtime.attention_call import AttentionCall
from torch import Tensor

BF16 = torch.bfloat16


def roomy(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return a tensor whose storage has room for views with other strides and dtypes."""
    whole = torch.zeros(16 * prod(shape) + 64, dtype=dtype)
    return whole[: prod(shape)].view(shape)


def make_call(
    is_paged: bool = True,
    is_latent: bool = False,
    dtype: torch.dtype | None = None,
    options: dict[str, Any] | None = None,
    query_dtype: torch.dtype = BF16,
    size: int = 0,
    value_size: int = 0,
    heads: int = 8,
    kv_heads: int = 0,
    slots: int = 16,
    padding: int = 0,
) -> AttentionCall:
    """Return a call that a family supports.

    Args:
        dtype: of the cache. If None, that of the queries.
        size, value_size, kv_heads: of a head, and KV heads. If 0, the usual ones of the family.
        slots: of a block.
        padding: elements after each key and value.
    """
    size = size or (576 if is_latent else 128)
    value_size = value_size or (512 if is_latent else size)
    kv_heads = kv_heads or (1 if is_latent else 2)
    storage, dtype = (9, slots) if is_paged else (30,), dtype or query_dtype
    key, value = (
        roomy(*storage, kv_heads, width + padding, dtype=dtype)[..., :width]
        for width in (size, value_size)
    )
    integers = partial(roomy, dtype=torch.int32)
    return AttentionCall(
        query=roomy(6, heads, size, dtype=query_dtype),
        key=key,
        value=key[..., :value_size] if is_latent else value,
        block_table=integers(2, 4) if is_paged else None,
        query_start_loc=integers(3),
        lengths=integers(2 if is_paged else 3),
        max_query_len=3,
        max_key_len=30,
        scale=0.125,
        out=roomy(6, heads, value_size, dtype=query_dtype),
        lse=roomy(heads, 6, dtype=torch.float32),
        options=AttentionOptions(**({"causal": True} | (options or {}))),
    )
