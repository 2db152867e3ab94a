"""Calls whose decodes the Hopper FP8 decode kernel computes, and its tiles.

It takes the place of the portable decode kernel in a launch: same arguments, same workspace.
"""

from dataclasses import fields

import torch
from torch import Tensor

from .....contract.attention_options import AttentionOptions
from ....launch.chip import is_hopper
from ....launch.tuning import Tiles
from ...arguments import Config, Strides
from .config import PAGE
from .kernel import fp8_decode_kernel

__all__ = ["TILES", "fp8_decode_kernel", "is_aligned", "supports", "takes_signature"]

HEAD_SIZES = (64, 128)
"""Head sizes of keys, and of values. At 256, acc and Q alone would take 192 registers."""
BLOCK_M = 16
"""Rows of a tile: those of one mma instruction."""
TILES = Tiles(BLOCK_M, 128, 4, 1)
"""Tiles of all decodes, with two programs per SM.

H200, torch 2.11, triton 3.6, bfloat16 queries, e4m3, 32 query heads, 8 kv heads of 128, blocks of
16, cold L2, medians of 20, interleaved with the portable kernel: 64 over 4,096 keys 161 us and 186,
24 over 12,288 175 and 203, one over 131,072 beside 31 over 4,096 162 and 185, 256 of 128 to 8,192
keys 356 and 386. Twice as many programs, of which two run at a time: 163, 191, 170 and 360.

In another run, without the stream-K partition: tiles of 64 keys 194 us for 64 over 4,096, where
tiles of 128 took 164; 8 warps with one program per SM 213. A ring of cp.async copies in shared
memory, read once, took 201 to 208 with 2, 3, 5 and 6 stages.
"""
READ_OPTIONS = (
    "causal",
    "batch_invariant",
    "sliding_window",
    "attention_chunk_size",
    "logits_soft_cap",
    "sinks",
    "k_scale",
    "v_scale",
    "out_scale",
)
OTHER_OPTIONS = [
    each.name for each in fields(AttentionOptions) if each.name not in READ_OPTIONS
]
"""Options that this kernel does not support: each must be None."""


def supports(
    query: Tensor,
    key: Tensor,
    strides: Strides,
    config: Config,
    options: AttentionOptions,
    short_rows: int,
) -> bool:
    """Return whether the kernel computes the short requests of calls with this signature.

    Args:
        query, key: of the call.
        strides, config: of the portable launches.
        options: of the call.
        short_rows: rows of a short request, at most; 0 without a decode launch.
    """
    return is_hopper(query.device) and takes_signature(
        query, key, strides, config, options, short_rows
    )


def takes_signature(
    query: Tensor,
    key: Tensor,
    strides: Strides,
    config: Config,
    options: AttentionOptions,
    short_rows: int,
) -> bool:
    """Return whether the kernel computes such calls, whatever their device."""
    if not config.CACHE_FP8 or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    if short_rows != BLOCK_M or type(options.causal) is not bool:
        return False
    if any(getattr(options, name) is not None for name in OTHER_OPTIONS):
        return False
    if config.HEAD_DIM not in HEAD_SIZES or config.V_HEAD_DIM not in HEAD_SIZES:
        return False
    if not config.BLOCK_SIZE or config.BLOCK_SIZE % PAGE.value or not key.shape[0]:
        return False
    # words of 16 bytes
    steps = (
        strides.k_block, strides.k_slot, strides.k_head,
        strides.v_block, strides.v_slot, strides.v_head,
    )  # fmt: skip
    return (
        strides.k_element == strides.v_element == 1
        and not any(each % 16 for each in steps)
        and min(steps) >= 0
    )


def is_aligned(key: Tensor, value: Tensor) -> bool:
    """Return whether keys and values begin at addresses that the kernel can load from."""
    return not (key.data_ptr() | value.data_ptr()) % 16
