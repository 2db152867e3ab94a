"""Figures of bugs in which a number does not fit its type, or is infinite or NaN."""

from typing import Any

import torch

from .attention import paged_weights
from .figure import Strip, strip


def mask_of_minus_ten_thousand(ops: Any) -> list[Strip]:
    """One sequence of 4 tokens, all new. Key 3 has the score 0, the others have -20,000."""
    scores = [-20000.0, -20000.0, -20000.0, 0.0]
    weights = paged_weights(ops, 4, scores)
    keys = [f"key {key}" for key in range(4)]
    return [
        strip("scores", [f"{score:,.0f}" for score in scores], "a", keys),
        *(
            strip(f"weights of query {query}", weights[query], "a", keys)
            for query in range(4)
        ),
    ]


def fully_masked_row(ops: Any) -> list[Strip]:
    """Cross-attention over one key with the value 5, and over none. Both are merged with 8."""
    lse = torch.zeros(1, 2)
    out = ops.encoder_attention(
        torch.zeros(2, 1, 1),
        torch.zeros(1, 1, 1),
        torch.full((1, 1, 1), 5.0),
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([0, 1, 1], dtype=torch.int32),
        1,
        1,
        lse=lse,
    )
    other = torch.full((2, 1, 1), 8.0)
    merged = ops.merge_attn_states(out, lse, other, torch.zeros(1, 2))
    names = ["request 0", "request 1"]
    return [
        strip("visible keys", [1, 0], "ab", names),
        strip("output", out.flatten(), "ab", names),
        strip("log-sum-exp", lse.flatten(), "ab", names),
        strip("merged with another partial result", merged.flatten(), "ab", names),
    ]


def zero_times_nan(ops: Any) -> list[Strip]:
    """Sliding window 2, all scores 0. Slot 0 was released: all elements of its value are NaN."""
    weights = paged_weights(ops, 1, [0.0] * 4, nan_in=0, sliding_window=2)[0]
    keys = [f"key {key}" for key in range(4)]
    kinds = ["off", "off", "a", "a"]
    return [
        strip("visible", ["no", "no", "yes", "yes"], kinds, keys),
        strip("values, element 2", ["nan", 0, 1, 0], kinds, keys),
        strip("output, element 2", weights[2:3], "a"),
    ]


def scale_rounded_by_the_writer(ops: Any) -> list[Strip]:
    """FP8 codes 16, 18, 20, 22 have a distance of 2. The scale is 1.0039, in bfloat16 it is 1."""
    numbers = torch.tensor([17.03, 18.5, 19.03, 21.05])
    scale = 1.0039
    cache = torch.zeros(1, 4, 1, 1, dtype=torch.float8_e4m3fn)
    value_cache = torch.zeros_like(cache)
    ops.reshape_and_cache(
        numbers.view(4, 1, 1),
        numbers.view(4, 1, 1),
        cache,
        value_cache,
        torch.arange(4),
        k_scale=scale,
        v_scale=scale,
    )
    codes = cache.flatten().float()
    return [
        strip("keys", numbers, "a"),
        strip("keys / scale", numbers / scale),
        strip("codes in the cache", codes, "b"),
        strip("codes * scale", codes * scale, "a"),
    ]


def block_id_in_eight_bits(ops: Any) -> list[Strip]:
    """300 blocks of one slot. The value in block n is the number n."""
    value = torch.arange(300.0).view(300, 1, 1, 1)
    row = [7, 255, 256, 258]
    out = ops.paged_attention(
        torch.zeros(4, 1, 1),
        torch.zeros(300, 1, 1, 1),
        value,
        torch.tensor(row, dtype=torch.int32)[:, None],
        torch.arange(5, dtype=torch.int32),
        torch.ones(4, dtype=torch.int32),
        1,
        1,
    ).flatten()
    names = [f"request {request}" for request in range(4)]
    return [
        strip("block of each request", row, "a", names),
        strip("output of each request", out, "a", names),
    ]
