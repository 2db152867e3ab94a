"""Triton kernels that write records to their cache and gather numbers from it."""

import triton
import triton.language as tl

from ..find_request import find_request
from .record import (
    COLUMNS,
    ROPE,
    find_slots,
    load_latents,
    load_rope,
    store_records,
)

TOKENS_PER_PROGRAM = tl.constexpr(2)


@triton.jit(do_not_specialize=["num_slots"])
def write_records_kernel(
    kv_c,
    k_pe,
    kv_cache,
    slot_mapping,
    num_slots,
    mapping_stride,
    block_size,
    config: tl.constexpr,
):
    """Write the record of each token to its slot.

    Args:
        kv_c, k_pe: NewLatents.
        kv_cache: RecordCache.
        config: RecordConfig.
    """
    token = tl.program_id(0).to(tl.int64) * TOKENS_PER_PROGRAM
    token += tl.arange(0, TOKENS_PER_PROGRAM)
    slot = tl.load(
        slot_mapping + token * mapping_stride, mask=token < num_slots, other=-1
    )
    # step: skip tokens without a slot
    stored = slot >= 0
    # step: find block and offset
    block_id, offset = slot // block_size, slot % block_size
    slots = find_slots(kv_cache, block_id, offset, block_size, stored, config)
    # step: store the latent and the rope key
    store_records(kv_cache, slots, kv_c, k_pe, token, config)


@triton.jit(
    do_not_specialize=[
        "begin",
        "num_tokens",
        "num_reqs",
        "num_halvings",
        "table_stride_req",
    ]
)
def gather_records_kernel(
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
    latents_stride_token,
    latents_stride_element,
    config: tl.constexpr,
):
    """Write the numbers of concatenated sequences, `num_tokens` from token `begin` on.

    Args:
        kv_cache: RecordCache.
        latents: [num_tokens, RANK + ROPE] of any float dtype. Rows past the last sequence become 0.
        config: RecordConfig.
    """
    row = tl.program_id(0) * TOKENS_PER_PROGRAM + tl.arange(0, TOKENS_PER_PROGRAM)
    token = begin + row
    req = find_request(start_loc, token, num_reqs, num_halvings)
    is_token = (row < num_tokens) & (req < num_reqs)
    position = token - tl.load(start_loc + req, mask=is_token, other=0)
    entry = (position // block_size).to(tl.int64) * table_stride_entry
    entry += req.to(tl.int64) * table_stride_req
    block_id = tl.load(block_table + entry, mask=is_token, other=0).to(tl.int64)
    offset = (position % block_size).to(tl.int64)
    slots = find_slots(kv_cache, block_id, offset, block_size, is_token, config)
    stored: tl.constexpr = latents.dtype.element_ty
    exact: tl.constexpr = tl.float64 if stored == tl.float64 else tl.float32
    numbers = load_latents(kv_cache, slots, exact, config)
    rope = load_rope(kv_cache, slots, config)
    element = tl.arange(0, COLUMNS).to(tl.int64)
    places = (row.to(tl.int64) * latents_stride_token)[:, None]
    is_row = (row < num_tokens)[:, None]
    tl.store(
        latents + places + (element * latents_stride_element)[None, :],
        numbers.to(stored),
        mask=is_row & (element < config.RANK)[None, :],
    )
    element = config.RANK + tl.arange(0, ROPE).to(tl.int64)
    tl.store(
        latents + places + (element * latents_stride_element)[None, :],
        rope.to(stored),
        mask=is_row,
    )
