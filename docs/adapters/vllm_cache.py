"""Adapter for vLLM's Triton kernels that write the cache and merge partial results.

`triton_reshape_and_cache_flash` and `merge_attn_states`. The first gets the stride of new tokens,
which may be slices of a fused QKV tensor. It uses the strides of blocks and slots of the key cache
for values too. The second assumes the same strides of both partial results. Laws about writes read
the cache by `gather_cache`, which is a few lines of torch here.
"""

from itertools import pairwise

import torch
from pagetwin.conformance import Support

try:
    from vllm.v1.attention.ops.triton_merge_attn_states import (
        merge_attn_states as merge,
    )
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
        triton_reshape_and_cache_flash,
    )
except ImportError as error:
    raise ImportError("this adapter needs vLLM and a GPU: pip install vllm") from error

WRITES = ["key", "value", "key_cache", "value_cache"]
MERGES = ["prefix_output", "suffix_output", "prefix_lse", "suffix_lse", "output"]
SUPPORT = Support(
    operations=["reshape_and_cache", "gather_cache", "merge_attn_states"],
    devices=["cuda"],
    dtypes=["float32", "float16", "bfloat16"],
    cache_dtypes=["float32", "float16", "bfloat16"],
    tensor_dtypes={
        name: ["float32"] for name in ("prefix_lse", "suffix_lse", "output_lse")
    },
    kv_layouts=["NHD"],
    strides=dict.fromkeys(WRITES, "packed heads") | dict.fromkeys(MERGES, "packed"),
    same_strides=[("key_cache", "value_cache")],
    options=["output", "output_lse", "prefill_tokens_with_context"],
    rejects=[],
)


def reshape_and_cache(
    key,  # [tokens, kv_heads, head_size]
    value,
    key_cache,  # [num_blocks, block_size, kv_heads, head_size]
    value_cache,
    slot_mapping,  # [tokens] int64, -1 for a token that is not stored
):
    """Write keys and values into their slots."""
    if not len(slot_mapping):
        return
    one = torch.ones(1, device=key.device)
    triton_reshape_and_cache_flash(
        key, value, key_cache, value_cache, slot_mapping, "auto", one, one
    )


def gather_cache(
    key_cache,  # [num_blocks, block_size, kv_heads, head_size]
    value_cache,
    block_table,  # [reqs, max_blocks]
    seq_start_loc,  # [reqs + 1]
    num_tokens,
    k_scale=None,  # a number, [kv_heads] or [num_blocks, block_size, kv_heads]
    v_scale=None,
    dtype=None,  # of the result; if None, codes come as they are
):
    """Return the keys and values of whole sequences, one after another, then rows of zeros."""
    starts, size = seq_start_loc.tolist(), key_cache.shape[1]
    slots = [
        (int(block_table[req, index // size]), index % size)
        for req, (start, end) in enumerate(pairwise(starts))
        for index in range(end - start)
    ]
    blocks, offsets = (
        torch.tensor(slots, dtype=torch.int64, device=key_cache.device).reshape(-1, 2).T
    )
    results = []
    for cache, scale in ((key_cache, k_scale), (value_cache, v_scale)):
        result = cache.new_zeros(num_tokens, *cache.shape[2:], dtype=dtype)
        numbers = cache[blocks, offsets]
        if dtype is not None:
            scale = torch.as_tensor(scale, dtype=torch.float32, device=cache.device)
            if scale.ndim == 3:
                scale = scale[blocks, offsets]
            numbers = (numbers.float() * scale[..., None]).to(dtype)
        result[: len(slots)] = numbers
        results.append(result)
    return tuple(results)


def merge_attn_states(
    prefix_output,  # [tokens, query_heads, head_size]
    prefix_lse,  # [query_heads, tokens]
    suffix_output,
    suffix_lse,
    output=None,
    output_lse=None,
    prefill_tokens_with_context=None,
):
    """Return attention over two sets of keys."""
    output = torch.empty_like(prefix_output) if output is None else output
    if output.numel():
        merge(
            output,
            prefix_output,
            prefix_lse,
            suffix_output,
            suffix_lse,
            output_lse,
            prefill_tokens_with_context,
        )
    return output
