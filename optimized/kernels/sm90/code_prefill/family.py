"""Kernel family of prefills from caches that are converted first, on Hopper chips.

These are caches of codes, and caches of 16 bits whose blocks TMA does not load, or in small boxes:
of 1, 4, 12, 8 or 24 tokens, or with other strides. A launch converts the keys and values of the
long requests to the dtype of the queries, in blocks of 128 in a workspace, and then launches the
prefill kernel on them.
On an H200 (torch 2.11, triton 3.6, e4m3, 32 query heads, 8 kv heads of 128, medians of 9) a prompt
of 16,384 tokens takes 2,902 us, from a bfloat16 cache 2,990, and with the portable kernel 6,365.
2,048 tokens on 32,768 keys take 1,460, 1,467 and 3,270. The outputs are those of the bfloat16
cache, bit for bit.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .....contract.cache_formats import find_format, head_size_of
from ....runtime.attention_call import AttentionCall
from ....runtime.cost_constants import DECODE_BYTES_PER_US, LAUNCH_US
from ....runtime.cost_layer import BatchBounds, Layer, describe_layer
from ....runtime.family import (
    BatchLimits,
    Estimate,
    KernelFamily,
    Role,
    Task,
    Warm,
)
from ....runtime.launcher import Launcher
from ...fp8 import scale_arguments
from ...portable.formats.int4_per_token_head import count_channels
from ..common.chip import is_hopper
from ..common.config import SWIZZLE_ROWS, WARPGROUP_M
from ..common.entry import launch_by_pointers
from ..common.planes import find_planes, unsupported
from ..prefill import family as sm90
from ..prefill.plan import PrefillPlan
from .kernel import BLOCK, UpcastArguments
from .launcher import find_row_alignment, make_launcher, split_workspace

MAX_BYTES = 1 << 29
"""Bytes of converted keys and values, at most. The bound counts every request with the longest
one's keys. A call that may need more is left to the portable kernel."""
FEW_KEYS = 4096
"""Keys of a request for which a warm-up launches the kernels too. With more, a call may exceed
MAX_BYTES."""
ROUNDED_SCALE = 2.0
"""Keys are rounded up to this scale of the scores, in units of head_size ** -0.5.

If queries and keys have a variance of 1, it is the standard deviation of the scores. Outputs took
up to 0.4 of their error budget with one of 1, 0.5 with one of 3, 0.9 with one of 11, and 1.7 with
one of 25."""
MAX_FITTED_HEAD_SIZE = 128
"""The largest head size of bfloat16 queries that are fitted to float16. Columns beyond would be in
tiles of their own, which are not fitted."""


SMALL_BOX_SHARE, OTHER_BOX_SHARE = 0.10, 0.28
"""How much longer a prefill takes that loads keys in boxes of 8 rows, as a share: with blocks of 8,
and of other multiples of 8, whose numbers take divisions.

With 32 query heads, 8 kv heads of 128 (H200, bfloat16, cold L2, medians of 9), in us by tokens of a
block, and copied to blocks of 128:

| new tokens on keys | 64  | 16  | 8   | copied | 24  | copied | 48  | copied |
|--------------------|----:|----:|----:|-------:|----:|-------:|----:|-------:|
| 4 x 2,048          | 237 | 248 | 273 | 255    | 316 | 255    | 259 | 257    |
| 2,048 on 16,384    | 740 | 753 | 802 | 779    | 963 | 779    | 784 | 772    |
| 32 x 64 on 2,048   | 136 | 139 | 149 | 179    | 165 | 190    | 143 | 173    |

Blocks of 40 take as long as those of 24, and those of 32 and 96 as those of 64."""


class SmallBoxes(NamedTuple):
    """The way of a call without a copy.

    Args:
        plan: the plan of the prefill kernel for the cache as it is.
        layer: what the estimates need to know.
        share: how much longer it takes than with blocks of 128, as a share.
    """

    plan: PrefillPlan
    layer: Layer
    share: float


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
    # narrow query tiles over a converted cache are not measured
    prefill.narrow = None
    exact = None
    if not form.is_rotated or _are_keys_exact(call):
        exact = prefill.fitted() if _fits_queries(call) else prefill
    rounded = prefill if _may_round_keys(call) else None
    alignment = find_row_alignment(call.key, call.value)
    upcast = make_launcher(call, form.name, alignment)
    code_bytes = call.key.dtype.itemsize / form.codes_per_element
    return CodePrefillPlan(
        prefill, exact, rounded, upcast, form.has_token_scales, code_bytes, alignment,
        not form.is_quantised, _find_small_boxes(call),
    )  # fmt: skip


@dataclass
class CodePrefillPlan:
    """Launches for all calls with one signature.

    Args:
        prefill: the plan of the prefill kernel for a cache in the dtype of the queries.
        exact: Optional. The plan if keys are converted exactly, and their scales multiply the
            scores. None if they are not exact in 16 bits.
        rounded: Optional. The plan if keys are multiplied by scales of their own, and rounded. None
            if they may not be.
        upcast: the launcher of the conversion.
        is_measured: whether each key and value has a scale of its own.
        code_bytes: bytes of a code, or of a number in 16 bits.
        is_plain: whether the cache has numbers in 16 bits, and no scales.
        alignment: bytes at a multiple of which the caches must begin.
        boxes: Optional. The way without a copy. If None, there is none.
    """

    prefill: PrefillPlan
    exact: PrefillPlan | None
    rounded: PrefillPlan | None
    upcast: Launcher
    is_measured: bool
    code_bytes: float
    alignment: int
    is_plain: bool
    boxes: SmallBoxes | None = None
    is_repeatable: ClassVar[bool] = True

    @property
    def clears_padding(self) -> bool:
        """Whether `launch_prefill` without short rows clears the rows of no request."""
        return self.prefill.clears_padding

    def estimate(self, layer: Layer, batch: BatchBounds) -> Estimate:
        """Return the time of the conversion and of the prefill."""
        time = self.prefill.estimate(layer, batch).time
        # a code per number is read, and two bytes are written
        numbers = batch.num_long * layer.kv_heads * batch.max_key_len * layer.numbers
        moved = (self.code_bytes + 2) * numbers
        converted = moved / (DECODE_BYTES_PER_US * layer.processors)
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
        if self.boxes is not None and not self._is_faster(call, self.boxes):
            return False
        addresses = call.key.data_ptr() | call.value.data_ptr()
        if addresses % self.alignment:
            return False
        if addresses % 16:
            # the converted cache is aligned
            call = _in_16_bits(call)
        plan = self._choose(call)[0]
        # the cache of codes has more rows than the converted one, or MAX_BYTES bounds them
        return plan is not None and plan.takes(call)

    def _is_faster(self, call: AttentionCall, boxes: SmallBoxes) -> bool:
        """Return whether the copy takes less time than small boxes take longer."""
        batch = BatchBounds(
            call.query_start_loc.shape[0] - 1, call.query.shape[0],
            call.max_query_len, call.max_key_len,
        )  # fmt: skip
        of_boxes = boxes.plan.estimate(boxes.layer, batch).time * (1 + boxes.share)
        return self.estimate(boxes.layer, batch).time < of_boxes

    def _choose(self, call: AttentionCall) -> tuple[PrefillPlan | None, bool]:
        """Return a plan, and whether keys are rounded. For scores that may be large: exact."""
        is_small = call.scale <= ROUNDED_SCALE * call.query.shape[-1] ** -0.5
        rounds = is_small and self.rounded is not None
        return self.rounded if rounds else self.exact, rounds

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
            plan = self._choose(call)[0]
            assert plan is not None
            plan.launch_prefill(*self.convert(call, short_rows))

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
        shapes = _converted_shapes(call)
        sizes = [math.prod(shape) // 2 for shape in shapes]
        plan, rounds = self._choose(call)
        assert plan is not None
        has_factors = self.is_measured and not rounds
        keys = key.shape[2] * reqs * num_blocks * BLOCK.value * has_factors
        of_heads = 0 if self.is_plain else heads
        sizes += [
            reqs * num_blocks,
            *((keys, 0) if self.is_measured else (of_heads, of_heads)),
        ]
        parts = split_workspace(query.device, sizes)
        dtypes = plan.dtype, query.dtype
        k_out, v_out = (
            part.view(dtype).view(shape)
            for part, dtype, shape in zip(parts, dtypes, shapes, strict=False)
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
            "k_scales_out": None if self.is_measured and not has_factors else parts[3],
            "v_scales_out": parts[4],
            "k_scale": scale_arguments(call.options.k_scale)[0],
            "v_scale": scale_arguments(call.options.v_scale)[0],
            "short_rows": short_rows,
            "num_blocks": num_blocks,
            "table_stride_req": block_table.stride(0),
        }
        grid = (2 * key.shape[2], num_blocks, reqs)
        launch_by_pointers(self.upcast, grid, UpcastArguments, arguments)
        converted = call._replace(key=k_out, value=v_out, block_table=table)
        if has_factors:
            factors = parts[3].view(key.shape[2], reqs, num_blocks * BLOCK.value)
            return converted, short_rows, (None, None), factors
        has_scales = not (self.is_measured or self.is_plain)
        scales = (parts[3], parts[4]) if has_scales else (None, None)
        return converted, short_rows, scales, None


def _takes_signature(call: AttentionCall) -> bool:
    """Return whether the kernels compute such calls, whatever their device."""
    key, value = call.key, call.value
    form = find_format(key.dtype, call.options.k_scale)
    if value.dtype != key.dtype:
        return False
    if form.is_quantised:
        if not form.scales_whole_rows:
            return False
    elif key.dtype != call.query.dtype:
        return False
    elif find_planes(call) is not None and not _has_small_boxes(call):
        # the prefill kernel takes the cache as it is
        return False
    if form.is_rotated and not (_are_keys_exact(call) or _may_round_keys(call)):
        return False
    if call.block_table is None or not key.shape[0] or call.options.batch_invariant:
        return False
    return find_planes(_in_16_bits(call)) is not None


def _has_small_boxes(call: AttentionCall) -> bool:
    """Return whether boxes of keys in blocks have the fewest rows that TMA takes."""
    rows = math.gcd(call.key.shape[1], WARPGROUP_M.value)
    return call.block_table is not None and rows == SWIZZLE_ROWS.value


def _find_small_boxes(call: AttentionCall) -> SmallBoxes | None:
    """Return the way of a call without a copy, or None if there is none."""
    if find_planes(call) is None or not _has_small_boxes(call):
        return None
    is_small = call.key.shape[1] == SWIZZLE_ROWS.value
    share = SMALL_BOX_SHARE if is_small else OTHER_BOX_SHARE
    return SmallBoxes(sm90.plan(call), describe_layer(call), share)


def _may_round_keys(call: AttentionCall) -> bool:
    """Return whether keys with scales of their own may be multiplied by them, and rounded.

    So they are as near as those of a cache in 16 bits. The error budget of an output is of plain
    torch in its dtype, which rounds keys too. That of a log-sum-exp is of float32.
    """
    form = find_format(call.key.dtype, call.options.k_scale)
    is_bfloat16 = call.query.dtype == torch.bfloat16
    is_rounded = is_bfloat16 or (form.is_rotated and not _are_keys_exact(call))
    return form.has_token_scales and call.lse is None and is_rounded


def _are_keys_exact(call: AttentionCall) -> bool:
    """Return whether rotated keys, rotated back and before their scale, are exact in float16.

    They are integers up to 15 times the channels of a rotation, and float16 has those up to 2,048.
    Bfloat16 has those up to 256. Its queries are fitted to float16 (`Sm90Config.FITS_QUERIES`).
    """
    head_size = call.query.shape[-1]
    if 15 * count_channels.fn(head_size) > 2048:
        return False
    is_square = head_size == head_size_of(call.value)
    return call.query.dtype == torch.float16 or (
        is_square and head_size <= MAX_FITTED_HEAD_SIZE
    )


def _fits_queries(call: AttentionCall) -> bool:
    """Return whether bfloat16 queries are fitted to float16, in which keys are exact."""
    form = find_format(call.key.dtype, call.options.k_scale)
    return form.is_rotated and call.query.dtype == torch.bfloat16


def _count_blocks(call: AttentionCall) -> int:
    """Return the blocks of the converted cache per request."""
    return max(1, -(-call.max_key_len // BLOCK.value))


def _converted_shapes(call: AttentionCall) -> list[tuple[int, int, int, int]]:
    """Return the shapes of the converted keys and values: blocks, slots, KV heads, elements."""
    blocks = call.lengths.shape[0] * _count_blocks(call)
    return [
        (blocks, BLOCK.value, cache.shape[2], head_size_of(cache))
        for cache in (call.key, call.value)
    ]


def _count_bytes(call: AttentionCall) -> int:
    """Return the bytes of the converted cache."""
    return 2 * sum(math.prod(shape) for shape in _converted_shapes(call))


def _in_16_bits(call: AttentionCall) -> AttentionCall:
    """Return the call of the prefill kernel, with tensors that have no memory."""
    key, value = (
        torch.empty(shape, dtype=call.query.dtype, device="meta")
        for shape in _converted_shapes(call)
    )
    table = torch.empty(
        call.lengths.shape[0], _count_blocks(call), dtype=torch.int32, device="meta"
    )
    options = replace(call.options, k_scale=None, v_scale=None)
    return call._replace(key=key, value=value, block_table=table, options=options)


FAMILY = KernelFamily("sm90 code prefill", Role.PREFILL, supports, plan)
