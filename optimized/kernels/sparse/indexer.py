"""Triton kernels of the indexer: the write of its keys, and its scores.

Offsets are 64-bit.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....contract import indexer_cache as contract
from ..find_request import find_request
from ..fp8 import decode_fp8, encode_fp8
from ..latent_records.fields import canonical_fp8, ceil_log2, finite_size, power_of_two

KEYS_PER_PROGRAM = 64
"""Keys whose scores a program computes; a quarter for float32 queries, which would spill."""
SMALLEST_SIZE = tl.constexpr(contract.SMALLEST_SIZE)


class IndexerCache(NamedTuple):
    """The two views of an indexer's cache, as a kernel's argument.

    Args:
        codes: [num_blocks, block_size, index_head_dim] uint8.
        scales: [num_blocks, block_size] float32.
        stride_block, stride_slot: Those of the codes.
        stride_scales: From block to block, of the scales.
    """

    codes: Any
    scales: Any
    stride_block: Any
    stride_slot: Any
    stride_scales: Any


class IndexQueries(NamedTuple):
    """Queries and the weights of their heads, as a kernel's argument.

    Args:
        tensor: [tokens, index_heads, index_head_dim]; FP8 as uint8.
        weights: [tokens, index_heads] float32.
    """

    tensor: Any
    weights: Any
    stride_token: Any
    stride_head: Any
    stride_element: Any
    stride_weights: Any
    stride_weight: Any


class Sequences(NamedTuple):
    """Block table, starts and lengths of the requests, as a kernel's argument."""

    block_table: Any
    start_loc: Any
    seq_lens: Any
    stride_req: Any
    stride_entry: Any


@triton.jit
def write_indexer_kernel(
    k, cache, slot_mapping, stride_token, stride_element, mapping_stride, block_size,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, UE8M0: tl.constexpr,
):  # fmt: skip
    """Write the key of one token. `cache`: IndexerCache."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, BLOCK_D)
    slot = tl.load(slot_mapping + token * mapping_stride)
    # step: divide the largest size of each key by the largest code
    place = k + token * stride_token + element.to(tl.int64) * stride_element
    number = tl.load(place, mask=element < DIM, other=0.0).to(tl.float32)
    size = tl.maximum(finite_size(number[None, :]), SMALLEST_SIZE)  # [1]
    # round to nearest, as the reference does: the default division is approximate
    scale = tl.div_rn(size, tl.full([1], 448.0, tl.float32))
    if UE8M0:
        scale = power_of_two(ceil_log2(scale))
    quotient = tl.div_rn(number[None, :], tl.broadcast_to(scale[:, None], [1, BLOCK_D]))
    code = canonical_fp8(encode_fp8(quotient, False), quotient)
    # step: skip tokens without a slot
    is_stored = slot >= 0
    # step: store the codes and the scale
    block, offset = slot // block_size, slot % block_size
    place = cache.codes + block * cache.stride_block + offset * cache.stride_slot
    mask = is_stored & (element < DIM)
    tl.store(place + element[None, :], code, mask=mask[None, :])
    place = cache.scales + block * cache.stride_scales + offset
    tl.store(place + tl.arange(0, 1), scale, mask=is_stored & (tl.arange(0, 1) == 0))


@triton.jit(do_not_specialize=["num_reqs", "num_halvings", "max_seq_len"])
def index_scores_kernel(
    queries, cache, batch, scores, num_reqs, num_halvings, block_size, max_seq_len,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, IS_FP8: tl.constexpr, NATIVE_FP8: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Compute one token's scores of BLOCK_N keys.

    Args:
        queries, cache, batch: IndexQueries, IndexerCache, Sequences.
        scores: [tokens, max_seq_len] float32, contiguous.
        DOT: dtype of the products' operands, which holds queries and keys exactly. If float32, a
            product is that of three TF32 numbers.
    """
    token = tl.program_id(0)
    row = token.to(tl.int64)
    position = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    req = find_request(
        batch.start_loc, token + tl.zeros([1], tl.int32), num_reqs, num_halvings
    )
    req = tl.sum(req, 0)
    has_request = req < num_reqs
    seq_len = tl.load(batch.seq_lens + req, mask=has_request, other=0)
    end = tl.load(batch.start_loc + req + 1, mask=has_request, other=0)
    own = seq_len - end + token
    is_key = (position <= own) & (position < seq_len) & has_request
    # step: gather the sequence's codes and scales
    entry = (position // block_size).to(tl.int64) * batch.stride_entry
    table = batch.block_table + req.to(tl.int64) * batch.stride_req
    block = tl.load(table + entry, mask=is_key, other=0).to(tl.int64)
    offset = (position % block_size).to(tl.int64)
    element, head = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H)
    place = block * cache.stride_block + offset * cache.stride_slot  # [BLOCK_N]
    code = tl.load(
        cache.codes + place[None, :] + element[:, None],
        mask=is_key[None, :] & (element < DIM)[:, None],
        other=0,
    )
    k = decode_fp8(code, False, NATIVE_FP8).to(DOT)  # [BLOCK_D, BLOCK_N]
    scale = tl.load(
        cache.scales + block * cache.stride_scales + offset, mask=is_key, other=0.0
    )
    # step: compute each head's dot products, and cut them off below 0
    is_head = head < HEADS
    place = (
        head[:, None] * queries.stride_head + element[None, :] * queries.stride_element
    )
    q = tl.load(
        queries.tensor + row * queries.stride_token + place,
        mask=is_head[:, None] & (element < DIM)[None, :],
        other=0,
    )
    if IS_FP8:
        q = decode_fp8(q, False, NATIVE_FP8)
    products = tl.dot(q.to(DOT), k, input_precision="tf32x3")
    products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    # step: add them up by weight, and multiply by the scales of the keys
    place = row * queries.stride_weights + head * queries.stride_weight
    weight = tl.load(queries.weights + place, mask=is_head, other=0.0)
    score = tl.sum(products * weight[:, None], 0) * scale
    # step: leave out later keys
    score = tl.where(is_key, score, float("-inf"))
    tl.store(scores + row * max_seq_len + position, score, mask=position < max_seq_len)
