"""Kernel family of decodes from FP8 caches on Hopper chips: supported calls, tiles, plans.

The kernel has the arguments and the workspace of the portable decode kernel.
"""

import torch
from torch import Tensor

from .....contract.attention_options import AttentionOptions
from .....contract.cache_formats import FORMATS
from ....runtime.attention_call import AttentionCall
from ....runtime.family import KernelFamily, Role
from ...portable.arguments import Config, Strides
from ...portable.host.launches import DecodeKernel
from ...portable.host.make_launches import make_launches
from ...portable.host.plans import PortableDecodePlan
from ...portable.host.tuning import Tiles
from ..common.chip import is_hopper
from ..common.planes import other_options
from .config import PAGE, is_measured
from .kernel import code_decode_kernel

HEAD_SIZES = (64, 128)
"""Head sizes of keys, and of values. At 256, acc and Q alone would take 192 registers."""
BLOCK_M = 16
"""Rows of a tile: those of one mma instruction."""
TILES = Tiles(BLOCK_M, 64, 2, 1)
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
OTHER_OPTIONS = other_options(READ_OPTIONS)
"""Options that this kernel does not support: each must be None."""


def supports(call: AttentionCall) -> bool:
    """Return whether the kernel computes the short requests of calls with this signature."""
    if not is_hopper(call.query.device):
        return False
    launches = make_launches(call)
    return takes_signature(
        call.query, call.key, launches.fixed["strides"], launches.config, call.options,
        launches.short_rows,
    )  # fmt: skip


def takes_signature(
    query: Tensor,
    key: Tensor,
    strides: Strides,
    config: Config,
    options: AttentionOptions,
    short_rows: int,
) -> bool:
    """Return whether the kernel computes such calls, whatever their device.

    Args:
        query, key, options: of the call.
        strides, config: of the portable launches.
        short_rows: rows of a short request, at most; 0 without a decode launch.
    """
    form = FORMATS[config.CACHE_FORMAT]
    if not form.is_quantised or form.channels_per_scale:
        return False
    if query.dtype not in (torch.bfloat16, torch.float16):
        return False
    if short_rows != BLOCK_M or type(options.causal) is not bool:
        return False
    if any(getattr(options, name) is not None for name in OTHER_OPTIONS):
        return False
    if config.HEAD_DIM not in HEAD_SIZES or config.V_HEAD_DIM not in HEAD_SIZES:
        return False
    if not config.BLOCK_SIZE or config.BLOCK_SIZE % PAGE.value or not key.shape[0]:
        return False
    steps = (
        strides.k_block, strides.k_slot, strides.k_head,
        strides.v_block, strides.v_slot, strides.v_head,
    )  # fmt: skip
    return (
        strides.k_element == strides.v_element == 1
        and (4 if is_measured(config.CACHE_FORMAT) else 16) <= config.ALIGNMENT
        and min(steps) >= 0
    )


class CodeDecodePlan(PortableDecodePlan):
    """Decode launches of the FP8 kernel, on the grid and in the workspace of the portable one."""

    kernel = DecodeKernel(code_decode_kernel, TILES, 4, 255)

    def takes(self, call: AttentionCall) -> bool:
        """Return whether the kernel takes what a signature leaves out.

        That is keys and values that begin at multiples of 16 bytes, and batches whose KV tiles do
        not have an SM each. The portable kernel for few decodes computes those: longer splits, and
        more programs, were not measured against it.
        """
        num_reqs = call.query_start_loc.shape[0] - 1
        is_few = self.is_few(num_reqs, call.max_key_len)
        size = self.launches.config.ALIGNMENT
        return not is_few and is_aligned(call.key, call.value, size)

    def is_few(self, num_reqs: int, max_key_len: int) -> bool:
        """Return whether each KV tile of each KV head may have an SM of its own.

        Example:
            132 SMs and 2 KV heads: one request of 66 tiles is few, and one of 67 is not.
        """
        launches = self.launches
        block_n = launches.small_batch_tiles.block_n
        keys = launches.bound_keys(max_key_len, block_n)
        tiles = max(1, -(-keys // block_n)) * launches.kv_heads
        return num_reqs * tiles <= launches.processors


def is_aligned(key: Tensor, value: Tensor, size: int) -> bool:
    """Return whether keys and values begin at addresses that the kernel can load from.

    Args:
        size: bytes at whose multiples their rows begin if the caches do.
    """
    return not (key.data_ptr() % size or value.data_ptr() % (16 if size == 16 else 4))


def plan(call: AttentionCall) -> CodeDecodePlan:
    """Return the launch plan of all calls with this call's signature."""
    return CodeDecodePlan(call)


FAMILY = KernelFamily("sm90 code decode", Role.DECODE, supports, plan)
