"""Kernel family of decodes from caches of codes on Hopper chips: supported calls, tiles, plans.

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
from .config import PAGE
from .kernel import code_decode_kernel

HEAD_SIZES = (64, 128)
"""Head sizes of keys, and of values."""
BLOCK_M = 16
"""Rows of a tile, at most: columns of two mma instructions."""
TILES = Tiles(BLOCK_M, 64, 2, 1)
"""Tiles of all decodes. Those of requests of at most 8 rows have 8.

H200, torch 2.11, triton 3.6, bfloat16 queries, 32 query heads, 8 kv heads of 128, blocks of 16,
cold L2, medians of 9 or 11, 2026-11-30. Decodes of 64 x 4,096 keys and of 256 x 1,500, in us. Each
row was measured in one process, with the same numbers in bfloat16, which take 262 and 383:

| keys, warps, programs per SM, registers | e4m3 | int8 per token | int4 per token |
|---|---|---|---|
| 128, 4, 2, 255 | 152, 246 | 161, 263 | 143, 256 |
| 64, 2, 4, 255 | 144, 218 | 151, 232 | 141, 239 |
| 32, 1, 8, 255 | 144, 207 | 151, 217 | 153, 230 |
| 64, 2, 6, 168 | 150, 215 | 176, 263 | 177, 277 |

One decode over 131,072 keys takes 86 us with two warps and 93 with one. More warps with fewer
registers wait as long as before, and spill. Since keys of int4 are levels (codes.py), it takes 133
and 230.
"""
PROGRAMS, REGISTERS = 4, 255
"""Programs that share an SM, and registers of their threads."""
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
    if not form.scales_whole_rows:
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
        and (4 if form.has_token_scales else 16) <= config.ALIGNMENT
        and min(steps) >= 0
    )


class CodeDecodePlan(PortableDecodePlan):
    """Decode launches of the kernel for codes, with the grid and workspace of the portable one."""

    kernel = DecodeKernel(code_decode_kernel, TILES, PROGRAMS, REGISTERS)

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
