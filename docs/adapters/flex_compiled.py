"""Adapter for PyTorch's FlexAttention, compiled: `flex_paged.py` with `torch.compile`."""

from dataclasses import replace

import flex_paged
import torch

torch._dynamo.config.recompile_limit = 256
flex_paged.flex_attention = torch.compile(flex_paged.flex_attention, dynamic=True)
SUPPORT = replace(
    flex_paged.SUPPORT,
    devices=["cuda"],
    dtypes=["float16", "bfloat16"],
    cache_dtypes=["float16", "bfloat16"],
    head_sizes=[64, 128],
    group_sizes=[1, 2, 4, 8],
)
paged_attention = flex_paged.paged_attention
