"""Triton kernels that write latents to their paged cache and gather them from it.

A program moves a tile of tokens by elements. Latents and rope keys are stored next to each other in
a slot, first the latent. Offsets are 64-bit.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .find_request import find_request
from .fp8 import encode_fp8, load_scale

BLOCK_TOKENS = tl.constexpr(16)
BLOCK_ELEMENTS = tl.constexpr(64)


class NewLatents(NamedTuple):
    """New latents or rope keys, as a kernel's argument, with strides in elements.

    Args:
        tensor: [tokens, elements].
    """

    tensor: Any
    stride_token: Any
    stride_element: Any


class LatentSlots(NamedTuple):
    """A latent cache, as a kernel's argument, with strides in elements.

    Args:
        tensor: [num_blocks, block_size, latent_width].
        scale, scale_stride: Optional. The scale of an FP8 cache, see `scale_arguments`.
    """

    tensor: Any
    scale: Any
    scale_stride: Any
    stride_block: Any
    stride_slot: Any
    stride_element: Any


def grid(tokens: int, width: int) -> tuple[int, int]:
    """Return the programs that move `tokens` latents of `width` elements."""
    return (
        triton.cdiv(tokens, BLOCK_TOKENS.value),
        triton.cdiv(width, BLOCK_ELEMENTS.value),
    )


@triton.jit(do_not_specialize=["num_slots"])
def write_latents_kernel(
    kv_c,
    k_pe,
    kv_cache,
    slot_mapping,
    num_slots,
    mapping_stride,
    block_size,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    E5M2: tl.constexpr,
):
    """Write the latent and the rope key of each token to its slot.

    Args:
        kv_c, k_pe: NewLatents.
        kv_cache: LatentSlots.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    element = tl.program_id(1) * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)
    element = element.to(tl.int64)  # [BLOCK_ELEMENTS]
    slot = tl.load(
        slot_mapping + token * mapping_stride, mask=token < num_slots, other=-1
    )
    # step: skip tokens without a slot
    stored = (slot >= 0)[:, None] & (element < WIDTH)[None, :]
    # step: find block and offset
    block_id, offset = slot // block_size, slot % block_size
    # step: store the latent and the rope key
    is_latent = (element < RANK)[None, :]
    # [BLOCK_TOKENS, BLOCK_ELEMENTS]
    moved = _load_new(kv_c, token, element, stored & is_latent)
    is_rope = (element >= RANK)[None, :]
    rope = _load_new(k_pe, token, element - RANK, stored & is_rope)
    moved = tl.where(is_latent, moved, rope)
    if kv_cache.scale is not None:
        # round to nearest, as the reference does: the default division is approximate
        divisor = load_scale(kv_cache.scale, kv_cache.scale_stride, 0, True)
        moved = encode_fp8(tl.div_rn(moved.to(tl.float32), divisor), E5M2)
    offsets = block_id * kv_cache.stride_block + offset * kv_cache.stride_slot
    offsets = offsets[:, None] + (element * kv_cache.stride_element)[None, :]
    tl.store(kv_cache.tensor + offsets, moved, mask=stored)


@triton.jit
def _load_new(new, token, element, is_new):
    """Return elements of new tokens: [BLOCK_TOKENS, BLOCK_ELEMENTS]."""
    offsets = (token * new.stride_token)[:, None]
    offsets += (element * new.stride_element)[None, :]
    return tl.load(new.tensor + offsets, mask=is_new, other=0)


@triton.jit(
    do_not_specialize=[
        "begin",
        "num_tokens",
        "num_reqs",
        "num_halvings",
        "table_stride_req",
    ]
)
def gather_latents_kernel(
    kv_cache,
    latents,
    block_table,
    start_loc,
    begin,
    num_tokens,
    block_size,
    num_reqs,
    num_halvings,
    table_stride_req,
    table_stride_entry,
    cache_stride_block,
    cache_stride_slot,
    cache_stride_element,
    WIDTH: tl.constexpr,
):
    """Copy the latents of concatenated sequences, `num_tokens` from token `begin` on."""
    row = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    element = tl.program_id(1) * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)
    element = element.to(tl.int64)  # [BLOCK_ELEMENTS]
    token = begin + row
    req = find_request(start_loc, token, num_reqs, num_halvings)
    is_token = (row < num_tokens) & (req < num_reqs)
    position = token - tl.load(start_loc + req, mask=is_token, other=0)
    entry = (position // block_size).to(tl.int64) * table_stride_entry
    entry += req.to(tl.int64) * table_stride_req
    block_id = tl.load(block_table + entry, mask=is_token, other=0).to(tl.int64)
    offset = (position % block_size).to(tl.int64)
    offsets = (block_id * cache_stride_block + offset * cache_stride_slot)[:, None]
    offsets += (element * cache_stride_element)[None, :]
    is_element = (element < WIDTH)[None, :]
    # [BLOCK_TOKENS, BLOCK_ELEMENTS]; rows past the last sequence are 0
    moved = tl.load(kv_cache + offsets, mask=is_token[:, None] & is_element, other=0)
    offsets = (row.to(tl.int64) * WIDTH)[:, None] + element[None, :]
    tl.store(latents + offsets, moved, mask=(row < num_tokens)[:, None] & is_element)
