"""Triton kernels that write latents to their paged cache and gather them from it.

A program moves a tile of tokens by elements. Latents and rope keys are stored next to each other in
a slot, first the latent. Offsets are 64-bit.
"""

import triton
import triton.language as tl

from ..cache.slot_mapping import find_request
from .fp8 import encode_fp8, load_scale

BLOCK_TOKENS = tl.constexpr(16)
BLOCK_ELEMENTS = tl.constexpr(64)


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
    scale,
    scale_stride,
    num_slots,
    block_size,
    mapping_stride,
    latent_stride_token,
    latent_stride_element,
    rope_stride_token,
    rope_stride_element,
    cache_stride_block,
    cache_stride_slot,
    cache_stride_element,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    E5M2: tl.constexpr,
):
    """Write the latent and the rope key of each token to its slot."""
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
    offsets = (token * latent_stride_token)[:, None]
    offsets += (element * latent_stride_element)[None, :]
    # [BLOCK_TOKENS, BLOCK_ELEMENTS]
    moved = tl.load(kv_c + offsets, mask=stored & is_latent, other=0)
    offsets = (token * rope_stride_token)[:, None]
    offsets += ((element - RANK) * rope_stride_element)[None, :]
    rope = tl.load(k_pe + offsets, mask=stored & (element >= RANK)[None, :], other=0)
    moved = tl.where(is_latent, moved, rope)
    if scale is not None:
        # round to nearest, as the reference does: the default division is approximate
        divisor = load_scale(scale, scale_stride, 0, True)
        moved = encode_fp8(tl.div_rn(moved.to(tl.float32), divisor), E5M2)
    offsets = (block_id * cache_stride_block + offset * cache_stride_slot)[:, None]
    offsets += (element * cache_stride_element)[None, :]
    tl.store(kv_cache + offsets, moved, mask=stored)


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
