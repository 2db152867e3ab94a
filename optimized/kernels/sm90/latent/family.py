"""Kernel family of latent decodes on Hopper chips: supported calls.

Latent decode is attention with one kv head of 576 elements whose values are the first 512 elements
of its keys. The family computes every request of a call, of any mixture of lengths.
"""

from operator import attrgetter

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
    blocks, block_size = call.key.shape[:2]
    stride = call.key.stride(1)
    block_rows = call.key.stride(0) // stride
    return LatentDecodePlan(
        dtype=call.query.dtype,
        num_heads=call.query.shape[1],
        block_size=block_size,
        kv_rows=(blocks - 1) * block_rows + block_size,
        kv_stride=stride,
        kv_block_rows=block_rows,
    )


def _is_latent_decode(call: AttentionCall) -> bool:
    """Return whether a call is a latent decode with dtypes, shapes and strides of this kernel."""
    query, key, value, block_table = call[:4]
    if call.options.causal is not True or call.options.batch_invariant:
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
    if query.shape[-1] != WIDTH.value or not blocks or block_size % 16:
        return False
    stride = key.stride(1)
    if key.stride() != value.stride() or key.stride(3) != 1 or stride < WIDTH.value:
        return False
    if stride % 8 or key.stride(0) % stride or key.stride(0) < 0:
        return False
    if call.out.stride(2) != 1 or any(stride % 8 for stride in call.out.stride()[:2]):
        return False
    # offsets of heads have 32 bits
    if query.shape[1] * call.out.stride(1) > MAX_COORDINATE:
        return False
    return bool(blocks * (key.stride(0) // stride) + BOX_MARGIN <= MAX_COORDINATE)


FAMILY = KernelFamily("sm90 latent", Role.EVERY, supports, plan)
