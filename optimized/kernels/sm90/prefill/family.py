"""Kernel family of Hopper chips (compute capability 9.0): supported calls, and their plans.

A launch plan holds what follows from a call's dtypes, shapes and strides. It is made once per call
signature.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ....runtime.attention_call import AttentionCall
from ....runtime.family import KernelFamily, Role
from ..common.chip import is_hopper
from ..common.config import (
    BOX_COLUMNS,
    WARPGROUP_M,
    Sm90Config,
    choose_block_n,
    choose_consumers,
    choose_group,
    choose_rows_per_token,
    choose_stages,
    pad_head_size,
)
from ..common.plan import Box
from ..common.planes import Plane, find_plane, find_planes, unsupported
from ..common.traits import has_padded_columns
from .packed import plan_packed
from .plan import PrefillPlan


def supports(call: AttentionCall) -> bool:
    """Return whether the kernel computes long requests of calls with this signature.

    The kernel is not batch-invariant: it and the portable decode kernel add up in different
    orders. `invariant/` has kernels for such calls.
    """
    return (
        is_hopper(call.query.device)
        and not call.options.batch_invariant
        and find_planes(call) is not None
    )


def plan(call: AttentionCall, may_cut_tokens: bool = True) -> PrefillPlan:
    """Return the launch plan of all calls with this call's signature, whatever their device.

    Args:
        call: the call.
        may_cut_tokens: whether query tiles may begin within a token
            (`Sm90Config.ROWS_PER_TOKEN`).

    Raises:
        NotImplementedError: options, a dtype, shapes or strides that the kernel does not support.
    """
    planes = find_planes(call)
    if planes is None:
        raise unsupported("Hopper prefill kernel")
    config = _make_config(call, may_cut_tokens)
    if config.ROWS_PER_TOKEN > 1:
        planes = _as_rows(call.query), *planes[1:3], _as_rows(call.out)
    q_plane, k_plane, v_plane, out_plane = planes
    boxes = _choose_boxes(call, config)
    # a map with a dimension of heads has the rows of one head
    k_plane, v_plane = (
        plane._replace(head_rows=0) if len(box) == 3 else plane
        for plane, box in zip((k_plane, v_plane), boxes[1:3], strict=True)
    )
    num_heads = call.query.shape[1]
    made = PrefillPlan(
        dtype=call.query.dtype,
        planes=planes,
        boxes=boxes,
        tokens=call.query.shape[0],
        keys=call.key.shape[0],
        num_heads=num_heads,
        group_size=num_heads // call.key.shape[-2],
        tile_rows=WARPGROUP_M.value * config.CONSUMERS,
        strides={
            "q_head_rows": q_plane.head_rows,
            "q_head_columns": q_plane.head_columns,
            "k_block_rows": k_plane.block_rows,
            "k_head_rows": k_plane.head_rows,
            "k_head_columns": k_plane.head_columns,
            "v_block_rows": v_plane.block_rows,
            "v_head_rows": v_plane.head_rows,
            "v_head_columns": v_plane.head_columns,
            "out_head_rows": out_plane.head_rows,
            "out_head_columns": out_plane.head_columns,
            "out_stride_token": call.out.stride(0),
            "out_stride_head": call.out.stride(1),
        },
        constants={"config": config},
    )
    if _has_step_of_heads(call, config) and config.ROWS_PER_TOKEN == 1:
        made.packed = plan_packed(made)
    return made.with_narrow()


def _as_rows(tensor: Tensor) -> Plane:
    """Return queries or outputs as a plane of rows, one per token and head."""
    tokens, heads, head_size = tensor.shape
    step = tensor.stride(1)
    plane = find_plane((tokens * heads, 1, head_size), (step, step, 1))
    assert plane is not None
    return plane


def _count_rows_per_token(call: AttentionCall) -> int:
    """Return the ROWS_PER_TOKEN of a call: more than 1 if its rows have one stride."""
    heads = call.query.shape[1]
    if call.key.shape[-2] > 1:
        return 1
    for tensor in (call.query, call.out):
        if not tensor.stride(0) == heads * tensor.stride(1) > 0:
            return 1
    return choose_rows_per_token(heads)


def _make_config(call: AttentionCall, may_cut_tokens: bool) -> Sm90Config:
    """Return the kernel's constants."""
    options: Any = call.options
    key_size, head_size = call.query.shape[-1], call.value.shape[-1]
    key_dim, tail_dim = pad_head_size(key_size)
    head_dim, v_tail_dim = pad_head_size(head_size)
    window, chunk_size = options.sliding_window or 0, options.attention_chunk_size or 0
    block_n = choose_block_n(key_dim, head_dim, v_tail_dim, window, chunk_size)
    config = Sm90Config(
        KEY_SIZE=key_size,
        HEAD_SIZE=head_size,
        KEY_DIM=key_dim,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=0 if call.block_table is None else call.key.shape[1],
        BLOCK_N=block_n,
        STAGES=choose_stages(key_dim, head_dim, v_tail_dim, block_n),
        CAUSAL=options.causal,
        WINDOW=window,
        CHUNK_SIZE=chunk_size,
        SOFT_CAP=float(options.logits_soft_cap or 0.0),
        # a log-sum-exp is float32, and its budget is smaller
        FAST_TANH=options.logits_soft_cap is not None
        and call.query.dtype == torch.bfloat16
        and call.lse is None,
        TAIL_DIM=tail_dim,
        V_TAIL_DIM=v_tail_dim,
        CONSUMERS=choose_consumers(key_size, head_size, False),
    )
    if not _has_step_of_heads(call, config):
        return config
    rows = _count_rows_per_token(call) if may_cut_tokens else 1
    if rows > 1:
        return config._replace(ROWS_PER_TOKEN=rows)
    group_size = call.query.shape[1] // call.key.shape[-2]
    return config._replace(GROUP=choose_group(group_size))


def _choose_boxes(call: AttentionCall, config: Sm90Config) -> tuple[Box, Box, Box, Box]:
    """Return the TMA boxes of queries, keys, values and the output."""
    rows, columns = WARPGROUP_M.value, BOX_COLUMNS.value
    # a tile has a box of all columns, or with a tail one per 64 columns
    q_columns = columns if config.TAIL_DIM else config.KEY_DIM
    out_columns = columns if config.V_TAIL_DIM else config.HEAD_DIM
    has_padded_keys = config.KEY_SIZE < config.KEY_DIM + config.TAIL_DIM
    # called by its function: triton 3.6 would give it a tuple without names
    has_padded_values = has_padded_columns.fn(config)
    has_heads = _has_step_of_heads(call, config)
    # tokens and heads
    tile = (rows // config.GROUP, config.GROUP)
    q_box: Box = (rows, q_columns)
    if has_heads and (config.GROUP > 1 or has_padded_keys):
        q_box = (*tile, q_columns)
    out_box: Box = (rows, out_columns)
    if has_heads and (config.GROUP > 1 or has_padded_values):
        out_box = (*tile, out_columns)
    # a box has at least SWIZZLE_ROWS rows and does not cross a block
    kv_rows = math.gcd(config.BLOCK_SIZE, config.BLOCK_N)
    k_box, v_box = (
        (kv_rows, 1, columns)
        if is_padded and cache.stride(-2) > 0
        else (kv_rows, columns)
        for is_padded, cache in (
            (has_padded_keys, call.key),
            (has_padded_values, call.value),
        )
    )
    return q_box, k_box, v_box, out_box


def _has_step_of_heads(call: AttentionCall, config: Sm90Config) -> bool:
    """Return whether queries and outputs may have boxes of tokens, heads and columns."""
    is_exact = (config.KEY_SIZE, config.HEAD_SIZE) == (192, 128)
    return not is_exact and call.query.stride(1) > 0


FAMILY = KernelFamily("sm90 prefill", Role.PREFILL, supports, plan)
