"""Kernel family of latent decodes on Hopper chips: supported calls.

Latent decode is attention with one kv head of 576 elements whose values are the first 512 elements
of its keys. The family computes every request of a call, of any mixture of lengths. TMA reads cache
blocks of a multiple of 16 slots; the slots of other blocks are copied one by one.
"""

from operator import attrgetter

from torch import Tensor

from ....runtime.attention_call import AttentionCall
from ....runtime.family import KernelFamily, Role
from ..common.chip import is_hopper
from ..common.planes import (
    BOX_MARGIN,
    DTYPES,
    MAX_COORDINATE,
    other_options,
    unsupported,
)
from .config import RANK, WIDTH
from .plan import LatentDecodePlan

READ_OPTIONS = ("causal", "batch_invariant")
get_other_options = attrgetter(*other_options(READ_OPTIONS))


def supports(call: AttentionCall) -> bool:
    """Return whether the kernel computes calls with this signature."""
    return is_hopper(call.query.device) and _is_latent_decode(call)


def plan(call: AttentionCall) -> LatentDecodePlan:
    """Return the launch plan of all calls with this call's signature, whatever their device.

    Raises:
        NotImplementedError: options, a dtype, shapes or strides that the kernel does not support.
    """
    if not _is_latent_decode(call):
        raise unsupported("Hopper latent decode kernel")
    key = call.key
    return LatentDecodePlan(
        dtype=call.query.dtype,
        num_heads=call.query.shape[1],
        block_size=key.shape[1],
        num_blocks=key.shape[0],
        kv_stride=key.stride(1),
        kv_block_stride=key.stride(0),
        is_causal=call.options.causal is True,
        is_copied=not _is_read_by_boxes(key),
    )


def _is_read_by_boxes(key: Tensor) -> bool:
    """Return whether TMA reads a cache as rows, of which a box of 16 does not cross a block."""
    blocks, block_size, _, width = key.shape
    block_stride, stride = key.stride()[:2]
    if block_size % 16 or stride < width or block_stride % stride:
        return False
    return bool(blocks * (block_stride // stride) + BOX_MARGIN <= MAX_COORDINATE)


def _is_latent_decode(call: AttentionCall) -> bool:
    """Return whether a call is a latent decode with dtypes, shapes and strides of this kernel."""
    query, key, value, block_table = call[:4]
    if type(call.options.causal) is not bool or call.options.batch_invariant:
        return False
    if any(option is not None for option in get_other_options(call.options)):
        return False
    if block_table is None or block_table.stride(1) != 1:
        return False
    dtype = query.dtype
    if dtype not in DTYPES or not dtype == key.dtype == value.dtype == call.out.dtype:
        return False
    blocks, block_size, kv_heads, width = key.shape
    if (width, value.shape[-1], kv_heads) != (WIDTH.value, RANK.value, 1):
        return False
    if query.shape[-1] != WIDTH.value or not blocks or not block_size:
        return False
    steps = key.stride()[:2]
    if key.stride() != value.stride() or key.stride(3) != 1:
        return False
    if any(step % 8 or not 0 <= step <= MAX_COORDINATE for step in steps):
        return False
    if call.out.stride(2) != 1 or any(stride % 8 for stride in call.out.stride()[:2]):
        return False
    # offsets of heads have 32 bits
    return bool(query.shape[1] * call.out.stride(1) <= MAX_COORDINATE)


FAMILY = KernelFamily("sm90 latent", Role.EVERY, supports, plan)
