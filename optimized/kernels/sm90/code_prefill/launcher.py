"""Launcher of the conversion of a cache of codes, and the parts of its workspace."""

from typing import Any

import torch
from torch import Tensor

from .....contract.cache_formats import FORMATS, PLAIN, head_size_of
from ....runtime.attention_call import AttentionCall
from ....runtime.launcher import Launcher, next_power_of_2
from ....runtime.workspace import find_workspace
from ...fp8 import has_native_fp8, scale_strides
from ...portable.arguments import Config
from ...portable.host.make_launcher import as_bits
from ...portable.host.make_launches import find_alignment
from ...portable.options.score import ScoreConstants
from ...portable.options.visible_range import lower_masks
from .kernel import CacheStrides, upcast_kernel

WARPS, ROTATION_WARPS = 4, 8
"""Warps of a program; those of one that rotates rows back, which has their tile in registers."""
ROTATION_REGISTERS, ROTATION_HEAD = 128, 128
"""Registers of a thread that rotates rows back, at most, up to this head size. Then two programs
share an SM."""
LEAST_COLUMNS = 32
"""Columns of a tile of rotated rows, at least. Triton's products add up 16 numbers at least, and a
byte has two columns."""
ALIGNMENT = 32
"""Float32 numbers, 128 bytes, at a multiple of which each part of the workspace begins."""


def make_launcher(call: AttentionCall, form: str, alignment: int) -> Launcher:
    """Return the launcher of the conversion from a format.

    Args:
        alignment: bytes at whose multiples rows begin.
    """
    query, key, value, block_table = call[:4]
    assert block_table is not None
    heads, head_size = key.shape[2], head_size_of(key)
    value_size = head_size_of(value)
    least = LEAST_COLUMNS if FORMATS[form].is_rotated else 1
    config = Config(
        GROUP_SIZE=query.shape[1] // heads,
        HEAD_DIM=head_size,
        BLOCK_D=max(least, next_power_of_2(head_size)),
        V_HEAD_DIM=value_size,
        BLOCK_DV=max(least, next_power_of_2(value_size)),
        ROPE_DIM=0,
        BLOCK_ROPE=0,
        BLOCK_SIZE=key.shape[1],
        masks=lower_masks(call.options, call.query_start_loc)[1],
        scores=ScoreConstants(0.0),
        CACHE_FORMAT=form,
        OUT_FORMAT=PLAIN.name,
        NATIVE_FP8=has_native_fp8(query.device),
        PIN_FP8_V=False,
        ALIGNMENT=alignment,
        BLOCK_M=0,
        BLOCK_N=0,
        MASK_ALL_TILES=False,
        CLEAR_PADDING=False,
        INDEX_64=True,
        UPCAST=False,
        ROW_SUMS=False,
    )
    entry = block_table.stride(1)
    fixed = {
        "k_strides": _strides_of(key, heads * head_size, entry),
        "v_strides": _strides_of(value, heads * value_size, entry),
        "scale_strides": scale_strides(call.options),
        "config": config,
    }
    warps, registers = WARPS, None
    if FORMATS[form].is_rotated:
        warps = ROTATION_WARPS
        if max(head_size, value_size) <= ROTATION_HEAD:
            registers = ROTATION_REGISTERS
    return Launcher(
        upcast_kernel, _as_bits, fixed, warps, num_stages=1, registers=registers
    )


def find_row_alignment(key: Tensor, value: Tensor) -> int:
    """Return bytes at whose multiples rows begin if both caches do.

    Triton finds multiples of 16 by itself, from each address.
    """
    if key.stride(3) != 1 or value.stride(3) != 1:
        return 1
    return 4 if 1 < find_alignment(key, value) < 16 else 1


def _strides_of(cache: Tensor, converted_slot: int, table_entry: int) -> CacheStrides:
    """Return the strides of keys or values; the last two arguments are fields of the result."""
    block, slot, head, element = cache.stride()
    return CacheStrides(block, slot, head, element, converted_slot, table_entry)


def _as_bits(key: Tensor, value: Tensor, *others: Tensor) -> tuple[Any, ...]:
    """Return the tensors of a launch with FP8 caches as bytes."""
    return (as_bits(key), as_bits(value), *others)


def split_workspace(device: torch.device, sizes: list[int]) -> list[Tensor]:
    """Return tensors of so many float32 numbers, each at a multiple of 128 bytes."""
    starts = [0]
    for size in sizes:
        starts.append(-(-(starts[-1] + size) // ALIGNMENT) * ALIGNMENT)
    numbers = find_workspace(device, 0, starts[-1])[1]
    return [
        numbers[start : start + size]
        for start, size in zip(starts, sizes, strict=False)
    ]
