"""Laws of the cache's content: what was written is there, and full blocks do not change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...contract.cache_formats import (
    CODES_PER_ELEMENT,
    TENSOR_SCALE_DTYPES,
    head_size_of,
)
from ..findings import Corruption
from ..step import HostStep, Integers
from .row_case import take_rows

SCALES = {"k_scale": "scale of the key", "v_scale": "scale of the value"}
"""The scales that a write measures, and what they are called in a sentence."""


@dataclass(frozen=True)
class RecordedWrite:
    """One layer's call of `reshape_and_cache`.

    Args:
        layer: name of the layer.
        key, value: [tokens, kv_heads, head_size] as the engine gave them; those of the sampled
            tokens alone where the write is checked.
        key_cache, value_cache: [num_blocks, block_size, kv_heads, head_size] after the write.
        scales: `k_scale` and `v_scale` of a quantised cache, and what multiplies block scales;
            empty for others. Measured ones are those after the write, [num_blocks, block_size,
            kv_heads, ...].
        fp8_steps: FP8 codes by which a stored number may differ from the reference. 0, or 1 for
            engines that multiply by the inverse of the scale.
        names: what key and value are called in a sentence. In latent attention the key is the
            latent and the value the rope key, and both caches are parts of one.
        format_name: Optional. Name of a format whose scales the write measures. If None, they are
            given.
    """

    layer: str
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    scales: dict[str, Any]
    fp8_steps: int = 0
    names: tuple[str, str] = ("key", "value")
    format_name: str | None = None

    def take(self, rows: Tensor) -> "RecordedWrite":
        """Return the call with some rows of key and value alone, [rows] int64."""
        key, value = take_rows(self.key, rows), take_rows(self.value, rows)
        return replace(self, key=key, value=value)


def check_write(
    write: RecordedWrite,
    step: HostStep,
    tokens: Sequence[int],
    reshape_and_cache: Callable[..., None],
) -> Corruption | None:
    """Return a violation if a new token's key or value, or its measured scale, is not in its slot.

    Args:
        write: the call, with the keys and values of the tokens alone.
        step: the step.
        tokens: [rows] the new tokens, at least one. Each of them has a slot in the cache.
        reshape_and_cache: the reference's operation.
    """
    block_size, device = write.key_cache.shape[1], write.key.device
    slots = torch.from_numpy(step.slot_mapping[list(tokens)]).to(device)
    block, offset = slots // block_size, slots % block_size
    found = {
        "key": write.key_cache[block, offset],
        "value": write.value_cache[block, offset],
    }
    scales = dict(write.scales)
    if write.format_name is not None:
        found |= {name: scales.pop(name)[block, offset] for name in SCALES}
    given = {"key": write.key, "value": write.value}
    expected = write_again(given, found, scales, write.format_name, reshape_and_cache)
    for side, stored in found.items():
        steps = 0 if side in SCALES else write.fp8_steps
        differs = _differs(stored, expected[side], steps)
        if not bool(differs.any()):
            continue
        index, head, *element = differs.nonzero()[0].tolist()
        token = tokens[index]
        row = step.row_of(token)
        name = dict(zip(("key", "value"), write.names, strict=True)).get(side)
        return Corruption(
            "cache write",
            f"{write.layer}: the {name or SCALES[side]} at position"
            f" {step.position_of(token)} (slot {int(step.slot_mapping[token])}), head"
            f" {head}{_in_row(side, stored, element)} is"
            f" {_shown(stored, index, head, *element)} in the cache: expected"
            f" {_shown(expected[side], index, head, *element)}",
            row,
            evidence={
                "kind": "write",
                "given": {key: one.cpu() for key, one in given.items()},
                "found": {key: one.cpu() for key, one in found.items()},
                "scales": {key: _plain(one) for key, one in scales.items()},
                "format": write.format_name,
                "fp8_steps": write.fp8_steps,
                "tokens": list(tokens),
            },
        )
    return None


def write_again(
    given: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    scales: Mapping[str, Any],
    format_name: str | None,
    reshape_and_cache: Callable[..., None],
) -> dict[str, Tensor]:
    """Return what the slots of some tokens have to hold, by the names of `found`.

    Args:
        given: "key" and "value" of the tokens, [rows, kv_heads, head_size].
        found: "key" and "value" in the cache, [rows, kv_heads, elements]; and "k_scale" and
            "v_scale", [rows, kv_heads, ...], if they are measured.
        scales: what is given: `k_scale` and `v_scale`, or what multiplies block scales. Empty if
            they are measured, or there is none.
        format_name: as in `RecordedWrite`.
        reshape_and_cache: the reference's operation.
    """
    # each token has a block of one slot
    blocks = {name: torch.zeros_like(one)[:, None] for name, one in found.items()}
    arguments = dict(scales)
    if format_name is not None:
        measured = {name: blocks[name] for name in SCALES}
        arguments |= measured | {"kv_cache_dtype": format_name}
    reshape_and_cache(
        given["key"],
        given["value"][..., : head_size_of(found["value"])],
        blocks["key"],
        blocks["value"],
        torch.arange(len(given["key"]), device=given["key"].device),
        **arguments,
    )
    return {name: block[:, 0] for name, block in blocks.items()}


@dataclass(frozen=True)
class WatchedBlock:
    """The content of a full block, to be compared in a later step.

    Args:
        layer: the layer.
        group: the layers that share its metadata.
        block_id: the block.
        column: index of the block in the row of the request.
        step: number of the step in which it was copied.
        caches: key cache and value cache of the layer, and the scales that a write has measured.
        before: copies of the block in these, [block_size, kv_heads, head_size], and of scales
            [block_size, kv_heads, ...].
    """

    layer: str
    group: str
    block_id: int
    column: int
    step: int
    caches: tuple[Tensor, ...]
    before: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        layer: str,
        step: HostStep,
        block_id: int,
        column: int,
        *caches: Tensor,
    ) -> "WatchedBlock":
        """Return a block with a copy of its content.

        Args:
            layer, block_id, column, caches: as in the class.
            step: the step in which it is copied.
        """
        before = tuple(cache[block_id].clone() for cache in caches)
        return cls(layer, step.group, block_id, column, step.number, caches, before)


def check_watched(
    watched: WatchedBlock, step: HostStep, last_write: Integers
) -> Corruption | None:
    """Return a violation if a full block changed although no token was written to it.

    Args:
        watched: the block.
        step: a later step, whose writes are done.
        last_write: [num_blocks] the last step that wrote to each block.
    """
    block_id, column = watched.block_id, watched.column
    if last_write[block_id] > watched.step or column >= step.block_table.shape[1]:
        return None
    # the block must still be full and at the same index of a row, or it may have a new owner
    holds = step.block_table[:, column] == block_id
    end = (column + 1) * step.block_size
    full = end <= step.seq_lens - step.query_lens
    # blocks before a window may have been given up, and rows name them all the same
    is_kept = holds & full & (end > step.first_keys) & (step.query_lens > 0)
    rows = is_kept.nonzero()[0]
    if not rows.size:
        return None
    names = ("key", "value", *SCALES.values())
    # caches without measured scales are two
    for name, cache, before in zip(names, watched.caches, watched.before, strict=False):
        now = cache[block_id]
        differs = _differs(now, before, 0)
        if not bool(differs.any()):
            continue
        offset, head, *element = differs.nonzero()[0].tolist()
        return Corruption(
            "unchanged blocks",
            f"{watched.layer}: the {name} at position"
            f" {column * step.block_size + offset} (block {block_id}, offset {offset}),"
            f" head {head}{_in_row(name, now, element)} changed from"
            f" {_shown(before, offset, head, *element)} to"
            f" {_shown(now, offset, head, *element)} after step {watched.step},"
            " although no step stored a token in that block: expected the same",
            int(rows[0]),
            evidence={
                "kind": "watched",
                "side": name,
                "before": before.cpu(),
                "now": now.cpu(),
            },
        )
    return None


def _in_row(side: str, cache: Tensor, element: Sequence[int]) -> str:
    """Return where in the row of a head something is, in words; a scale per token is not in a row.

    Args:
        side: what it is: a key or SCALES, or a value of it.
        cache: tells the dtype.
        element: its index, or nothing.
    """
    name = "byte" if CODES_PER_ELEMENT.get(cache.dtype, 1) > 1 else "element"
    if side in (*SCALES, *SCALES.values()):
        name = "block"
    return f", {name} {element[0]}" if element else ""


def _shown(tensor: Tensor, *at: int) -> str:
    """Return a number of a cache as text; codes of integers as such."""
    if tensor.dtype.is_floating_point:
        # two float32 scales may differ in the last bits alone
        return f"{float(tensor[at]):.{6 if len(at) > 2 else 9}g}"
    return f"code {int(tensor[at])}"


def _differs(found: Tensor, expected: Tensor, fp8_steps: int) -> Tensor:
    """Return where bits differ; FP8 numbers may differ by some codes."""
    if found.dtype in TENSOR_SCALE_DTYPES:
        # without the sign, the codes of FP8 are in the order of their numbers
        left, right = (
            tensor.contiguous().view(torch.uint8).int() for tensor in (found, expected)
        )
        if not fp8_steps:
            return left != right
        ordered = [torch.where(code < 128, code, 128 - code) for code in (left, right)]
        return (ordered[0] - ordered[1]).abs() > fp8_steps
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = found.element_size()
    left, right = (
        tensor.contiguous().view(integer[size]) for tensor in (found, expected)
    )
    return left != right


def _plain(scale: Any) -> Any:
    return scale.cpu() if isinstance(scale, Tensor) else scale
