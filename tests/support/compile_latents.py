"""Launches of the portable kernels of latents, as `compile_kernels.py` compiles them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from pagetwin.contract.attention_options import pack_options
from pagetwin.optimized.kernels.sm90.latent import family as sm90

RANK, ROPE = 512, 64
FP8 = {"cache_dtype": torch.float8_e4m3fn, "k_scale": torch.ones(1), "v_scale": 0.5}


def latent_cases(twin: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name of each case, and a function that makes its launches."""
    for name, heads, given in (
        ("bf16, 64 heads", 64, {}),
        ("bf16, 16 heads", 16, {}),
        ("float8_e4m3fn, 64 heads", 64, FP8),
        ("fp32, 16 heads", 16, {"dtype": torch.float32}),
        ("bf16, 256 + 32", 64, {"rank": 256, "rope": 32}),
        (
            "cap, ALiBi, sinks, window",
            64,
            {
                "sliding_window": 1024,
                "logits_soft_cap": 50.0,
                "alibi_slopes": torch.ones(64),
                "sinks": torch.ones(64),
            },
        ),
        (
            "chunk, tree, bias",
            64,
            {
                "attention_chunk_size": 2048,
                "tree_mask": torch.ones(2, 32, 32, dtype=torch.bool),
                "position_bias": torch.ones(64, 257),
            },
        ),
    ):
        yield f"latents, {name}", partial(decode, twin, heads, **given)


def decode(
    twin: Any,
    heads: int,
    rank: int = RANK,
    rope: int = ROPE,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    **options: Any,
) -> None:
    """Launch decodes of 2 requests over 4,096 latents, as on a chip without kernels of its own."""
    query = torch.zeros(2, heads, rank + rope, dtype=dtype)
    cache = torch.zeros(256, 16, 1, rank + rope, dtype=cache_dtype or dtype)
    with mock.patch.object(sm90, "is_hopper", lambda device: False):
        twin.paged_attention(
            query,
            cache,
            cache[..., :rank],
            torch.zeros(2, 256, dtype=torch.int32),
            torch.arange(3, dtype=torch.int32),
            torch.full((2,), 4096, dtype=torch.int32),
            1,
            4096,
            lse=torch.zeros(heads, 2),
            **pack_options(**options),
        )
