"""Adapter for PyTorch's FlexAttention, compiled: `flex_paged.py` with `torch.compile`.

It is compiled for each dtype, head size, scale and soft cap, so the domain has one of each.
Windows, chunks and causality are in a mask that is a tensor, and need no compilation.
"""

from dataclasses import replace

import flex_paged
import torch

torch._dynamo.config.recompile_limit = 256
flex_paged.flex_attention = torch.compile(flex_paged.flex_attention, dynamic=True)
SUPPORT = replace(
    flex_paged.SUPPORT,
    devices=["cuda"],
    dtypes=["bfloat16"],
    cache_dtypes=["bfloat16"],
    head_sizes=[64],
    group_sizes=[2],
    options={
        "out": None,
        "lse": None,
        "causal": None,
        "sliding_window": None,
        "attention_chunk_size": None,
        "logits_soft_cap": [2.0],
        "alibi_slopes": None,
    },
)
paged_attention = flex_paged.paged_attention
