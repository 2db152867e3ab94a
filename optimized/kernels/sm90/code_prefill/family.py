"""Kernel family of prefills from caches of codes of eight bits on Hopper chips.

A launch converts the keys and values of the long requests to the dtype of the queries, in a
workspace, and then launches the prefill kernel on them. On an H200 (torch 2.11, triton 3.6, e4m3,
32 query heads, 8 kv heads of 128, medians of 9) a prompt of 16,384 tokens takes 2,902 us, from a
bfloat16 cache 2,990, and with the portable kernel 6,365. 2,048 tokens on 32,768 keys take 1,460,
1,467 and 3,270. The outputs are those of the bfloat16 cache, bit for bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from .....contract.cache_formats import PLAIN, find_format
from ....runtime.attention_call import AttentionCall
from ....runtime.cost_constants import DECODE_BYTES_PER_US, LAUNCH_US
from ....runtime.cost_layer import BatchBounds, Layer
from ....runtime.family import (
    BatchLimits,
    Estimate,
    KernelFamily,
    Role,
    Task,
    Warm,
)
from ....runtime.launcher import Launcher, next_power_of_2
from ....runtime.workspace import find_workspace
from ...fp8 import has_native_fp8, scale_arguments, scale_strides
from ...portable.arguments import Config
from ...portable.host.make_launcher import as_bits
from ...portable.options.score import ScoreConstants
from ...portable.options.visible_range import lower_masks
from ..common.chip import is_hopper
from ..common.entry import launch_by_pointers
from ..common.planes import find_planes, unsupported
from ..prefill import family as sm90
from ..prefill.plan import PrefillPlan
from .kernel import BLOCK, CacheStrides, UpcastArguments, upcast_kernel

MAX_BYTES = 1 << 29
"""Bytes of converted keys and values, at most. The bound counts every request with the longest
one's keys. A call that may need more is left to the portable kernel."""
FEW_KEYS = 4096
"""Keys of a request for which a warm-up launches the kernels too. With more, a call may exceed
MAX_BYTES."""
ALIGNMENT = 32
"""Float32 numbers, 128 bytes, at a multiple of which each part of the workspace begins."""


def supports(call: AttentionCall) -> bool:
    """Return whether the kernels compute long requests of calls with this signature."""
    return is_hopper(call.query.device) and _takes_signature(call)


def plan(call: AttentionCall) -> "CodePrefillPlan":
    """Return the launch plan of all calls with this call's signature, whatever their device.

    Raises:
        NotImplementedError: options, a dtype, shapes or strides that the kernels do not support.
    """
    if not _takes_signature(call):
        raise unsupported("Hopper prefill kernel for caches of codes")
    form = find_format(call.key.dtype, call.options.k_scale)
    prefill = sm90.plan(_in_16_bits(call))
    return CodePrefillPlan(prefill, _make_launcher(call, form.name), form.is_measured)


@dataclass
class CodePrefillPlan:
    """Launches for all calls with one signature.

    Args:
        prefill: the plan of the prefill kernel for the converted cache.
        upcast: the launcher of the conversion.
        is_measured: whether each key and value has a scale of its own.
    """

    prefill: PrefillPlan
    upcast: Launcher
    is_measured: bool
    is_repeatable: ClassVar[bool] = True

    @property
    def clears_padding(self) -> bool:
        """Whether `launch_prefill` without short rows clears the rows of no request."""
        return self.prefill.clears_padding

    def estimate(self, layer: Layer, batch: BatchBounds) -> Estimate:
        """Return the time of the conversion and of the prefill."""
        time = self.prefill.estimate(layer, batch).time
        # one byte per number is read, and two are written
        numbers = batch.num_long * layer.kv_heads * batch.max_key_len * layer.numbers
        converted = 3 * numbers / (DECODE_BYTES_PER_US * layer.processors)
        return Estimate(time + (LAUNCH_US + converted))

    def bounds(self, limits: BatchLimits) -> Iterator[Warm]:
        """Yield the batches of the prefill, with few keys too: a plan may not take many."""
        few = min(FEW_KEYS, limits.max_key_len)
        for keys in sorted({few, limits.max_key_len}):
            for warm in self.prefill.bounds(limits._replace(max_key_len=keys)):
                yield warm._replace(name=type(self).__name__)

    def takes(self, call: AttentionCall) -> bool:
        """Return whether the kernels take what a signature leaves out: addresses and sizes."""
        if _count_bytes(call) > MAX_BYTES:
            return False
        if (call.key.data_ptr() | call.value.data_ptr()) % 16:
            # the converted cache is aligned
            call = _in_16_bits(call)
        # the cache of codes has more rows than the converted one, or MAX_BYTES bounds them
        return self.prefill.takes(call)

    def launch(self, call: AttentionCall, task: Task) -> None:
        """Compute all requests of more than `task.short_rows` rows."""
        self.launch_prefill(call, task.short_rows)

    def launch_prefill(self, call: AttentionCall, short_rows: int) -> None:
        """Compute all requests of more than `short_rows` rows, and leave the others as they are.

        Args:
            call: one that the plan takes; its `out` and `lse` are modified in place.
            short_rows: rows of the largest request that the decode kernel computes. If 0, the rows
                of no request are cleared if `clears_padding`.
        """
        if call.max_query_len * self.prefill.group_size > short_rows:
            self.prefill.launch_prefill(*self.convert(call, short_rows))

    def convert(
        self, call: AttentionCall, short_rows: int
    ) -> tuple[AttentionCall, int, tuple[Tensor | None, Tensor | None], Tensor | None]:
        """Convert the keys and values of the long requests.

        Args:
            call, short_rows: as in `launch_prefill`.

        Returns:
            The arguments of the prefill kernel's `launch_prefill`: the call with the converted
            cache, `short_rows`, the scales of keys and values, and the factors of keys.
        """
        query, key, value, block_table = call[:4]
        assert block_table is not None
        reqs, num_blocks = call.lengths.shape[0], _count_blocks(call)
        heads = query.shape[1]
        shapes = [
            (reqs * num_blocks, BLOCK.value, *cache.shape[2:]) for cache in (key, value)
        ]
        sizes = [torch.Size(shape).numel() // 2 for shape in shapes]
        keys = key.shape[2] * reqs * num_blocks * BLOCK.value
        sizes += [
            reqs * num_blocks,
            *((keys, 0) if self.is_measured else (heads, heads)),
        ]
        parts = _split_workspace(query.device, sizes)
        k_out, v_out = (
            part.view(query.dtype).view(shape)
            for part, shape in zip(parts, shapes, strict=False)
        )
        table = parts[2].view(torch.int32).view(reqs, num_blocks)
        arguments = {
            "k": key,
            "v": value,
            "block_table": block_table,
            "query_start_loc": call.query_start_loc,
            "seq_lens": call.lengths,
            "k_out": k_out,
            "v_out": v_out,
            "table_out": table,
            "k_scales_out": parts[3],
            "v_scales_out": parts[4],
            "k_scale": scale_arguments(call.options.k_scale)[0],
            "v_scale": scale_arguments(call.options.v_scale)[0],
            "short_rows": short_rows,
            "num_blocks": num_blocks,
            "table_stride_req": block_table.stride(0),
        }
        grid = (key.shape[2], num_blocks, reqs)
        launch_by_pointers(self.upcast, grid, UpcastArguments, arguments)
        converted = call._replace(key=k_out, value=v_out, block_table=table)
        if self.is_measured:
            factors = parts[3].view(key.shape[2], reqs, num_blocks * BLOCK.value)
            return converted, short_rows, (None, None), factors
        return converted, short_rows, (parts[3], parts[4]), None


def _takes_signature(call: AttentionCall) -> bool:
    """Return whether the kernels compute such calls, whatever their device."""
    key, value = call.key, call.value
    form = find_format(key.dtype, call.options.k_scale)
    if not form.is_quantised or form.codes_per_element != 1 or form.channels_per_scale:
        return False
    if value.dtype != key.dtype:
        return False
    if call.block_table is None or not key.shape[0] or call.options.batch_invariant:
        return False
    return find_planes(_in_16_bits(call)) is not None


def _count_blocks(call: AttentionCall) -> int:
    """Return the blocks of the converted cache per request."""
    return max(1, -(-call.max_key_len // BLOCK.value))


def _count_bytes(call: AttentionCall) -> int:
    """Return the bytes of the converted cache."""
    keys = call.lengths.shape[0] * _count_blocks(call) * BLOCK.value
    numbers = call.key.shape[2] * (call.key.shape[3] + call.value.shape[3])
    return 2 * keys * numbers


def _split_workspace(device: torch.device, sizes: list[int]) -> list[Tensor]:
    """Return tensors of so many float32 numbers, each at a multiple of 128 bytes."""
    starts = [0]
    for size in sizes:
        starts.append(-(-(starts[-1] + size) // ALIGNMENT) * ALIGNMENT)
    numbers = find_workspace(device, 0, starts[-1])[1]
    return [
        numbers[start : start + size]
        for start, size in zip(starts, sizes, strict=False)
    ]


def _in_16_bits(call: AttentionCall) -> AttentionCall:
    """Return the call of the prefill kernel, with tensors that have no memory."""
    blocks = call.lengths.shape[0] * _count_blocks(call)
    key, value = (
        torch.empty(
            blocks, BLOCK.value, *cache.shape[2:], dtype=call.query.dtype, device="meta"
        )
        for cache in (call.key, call.value)
    )
    table = torch.empty(
        call.lengths.shape[0], _count_blocks(call), dtype=torch.int32, device="meta"
    )
    options = replace(call.options, k_scale=None, v_scale=None)
    return call._replace(key=key, value=value, block_table=table, options=options)


def _make_launcher(call: AttentionCall, form: str) -> Launcher:
    """Return the launcher of the conversion from a format."""
    query, key, value, block_table = call[:4]
    assert block_table is not None
    heads, head_size = key.shape[2:]
    value_size = value.shape[3]
    config = Config(
        GROUP_SIZE=query.shape[1] // heads,
        HEAD_DIM=head_size,
        BLOCK_D=next_power_of_2(head_size),
        V_HEAD_DIM=value_size,
        BLOCK_DV=next_power_of_2(value_size),
        BLOCK_SIZE=key.shape[1],
        masks=lower_masks(call.options, call.query_start_loc)[1],
        scores=ScoreConstants(0.0),
        CACHE_FORMAT=form,
        OUT_FORMAT=PLAIN.name,
        NATIVE_FP8=has_native_fp8(query.device),
        PIN_FP8_V=False,
        ALIGNMENT=1,
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
    return Launcher(upcast_kernel, _as_bits, fixed, num_warps=4, num_stages=1)


def _strides_of(cache: Tensor, converted_slot: int, table_entry: int) -> CacheStrides:
    """Return the strides of keys or values; the last two arguments are fields of the result."""
    block, slot, head, element = cache.stride()
    return CacheStrides(block, slot, head, element, converted_slot, table_entry)


def _as_bits(key: Tensor, value: Tensor, *others: Tensor) -> tuple[Any, ...]:
    """Return the tensors of a launch with FP8 caches as bytes."""
    return (as_bits(key), as_bits(value), *others)


FAMILY = KernelFamily("sm90 code prefill", Role.PREFILL, supports, plan)
