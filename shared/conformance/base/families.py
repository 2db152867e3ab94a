"""Supports of the usual families of paged kernels, as a start for the SUPPORT of an adapter.

Each function returns what the family's public kernels take. Keyword arguments replace fields:

    SUPPORT = flash_attention_like(head_sizes=[128], block_sizes=[64])
"""

from dataclasses import replace
from typing import Any

from .support import Support

HALVES = ("float16", "bfloat16")
COMMON = Support(
    operations=["paged_attention"],
    devices=["cuda"],
    dtypes=HALVES,
    cache_dtypes=HALVES,
    rejects=[],
)
ROWS = dict.fromkeys(
    ("query", "key_cache", "value_cache", "block_table", "out"), "rows"
)
LENGTHS = dict.fromkeys(("query_start_loc", "seq_lens"), "packed")
OPTIONS = {
    "scale": None,
    "out": None,
    "lse": None,
    "causal": "bool",
    "sliding_window": None,
    "logits_soft_cap": None,
}


def flash_attention_like(**changes: Any) -> Support:
    """Return the support of a kernel with the arguments of `flash_attn_varlen_func`.

    Head sizes are multiples of 8 up to 256. Caches are NHD with 16-byte aligned rows. One causal
    flag per call, a window, a soft cap and a log-sum-exp. Only the last axis of queries, keys,
    values, outputs and the block table is contiguous, and lengths are.

    Args:
        changes: Fields of `Support` with other values.

    Source:
        The checks of strides in `hopper/flash_api.cpp` of FlashAttention.
    """
    family = replace(
        COMMON,
        head_sizes=range(8, 257, 8),
        kv_layouts=["NHD"],
        strides=ROWS | LENGTHS,
        alignment=16,
        options=OPTIONS,
    )
    return replace(family, **changes)


def flashinfer_like(**changes: Any) -> Support:
    """Return the support of a kernel with the arguments of FlashInfer's paged wrappers.

    Head sizes 64, 128 and 256, caches in either layout, a window only with causality. Wrappers
    take no request without keys. A query may have any strides of tokens and heads. Key and value
    caches need the same strides, and the output is packed: the kernel gets no strides of it.

    Args:
        changes: Fields of `Support` with other values.

    Source:
        `BatchPrefillWithPagedKVCacheRun` in `csrc/batch_prefill.cu` of FlashInfer.
    """
    family = replace(
        COMMON,
        head_sizes=[64, 128, 256],
        block_sizes=[1, 8, 16, 32],
        strides=ROWS | LENGTHS | {"out": "packed"},
        same_strides=[("key_cache", "value_cache")],
        alignment=16,
        options=OPTIONS,
        never_together=[("causal", "sliding_window")],
    )
    return replace(family, **changes)


def vllm_like(**changes: Any) -> Support:
    """Return the support of a kernel with the arguments of vLLM's Triton `unified_attention`.

    Causal only, blocks of a multiple of 16, any head size, ALiBi and sinks, no log-sum-exp. The
    kernel gets the strides of tokens and heads of queries and outputs, and the row stride of the
    block table. Their last axis is contiguous.

    Args:
        changes: Fields of `Support` with other values.

    Source:
        `unified_attention` in `v1/attention/ops/triton_unified_attention.py` of vLLM.
    """
    family = replace(
        COMMON,
        block_sizes=range(16, 129, 16),
        kv_layouts=["NHD"],
        strides=ROWS | LENGTHS,
        options=[
            "scale",
            "out",
            "sliding_window",
            "logits_soft_cap",
            "alibi_slopes",
            "sinks",
        ],
    )
    return replace(family, **changes)
