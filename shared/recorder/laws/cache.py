"""Laws of the cache's content: what was written is there, and full blocks do not change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...contract.cache_formats import TENSOR_SCALE_DTYPES
from ..findings import Corruption
from ..step import HostStep, Integers
from .attention import take_rows


@dataclass(frozen=True)
class RecordedWrite:
    """One layer's call of `reshape_and_cache`.

    Args:
        layer: name of the layer.
        key, value: [tokens, kv_heads, head_size] as the engine gave them; those of the sampled
            tokens alone where the write is checked.
        key_cache, value_cache: [num_blocks, block_size, kv_heads, head_size] after the write.
        scales: `k_scale` and `v_scale` of an FP8 cache; empty for others.
        fp8_steps: FP8 codes by which a stored number may differ from the reference. 0, or 1 for
            engines that multiply by the inverse of the scale.
        names: what key and value are called in a sentence. In latent attention the key is the
            latent and the value the rope key, and both caches are parts of one.
    """

    layer: str
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    scales: dict[str, Any]
    fp8_steps: int = 0
    names: tuple[str, str] = ("key", "value")

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
    """Return a violation if a new token's key or value is not in its slot.

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
    given = {"key": write.key, "value": write.value}
    expected = {
        name: torch.zeros_like(stored)[:, None] for name, stored in found.items()
    }
    reshape_and_cache(
        given["key"],
        given["value"][..., : found["value"].shape[-1]],
        expected["key"],
        expected["value"],
        torch.arange(len(tokens), device=device),
        **write.scales,
    )
    for name, (side, stored) in zip(write.names, found.items(), strict=True):
        differs = _differs(stored, expected[side][:, 0], write.fp8_steps)
        if not bool(differs.any()):
            continue
        index, head, element = differs.nonzero()[0].tolist()
        token = tokens[index]
        row = step.row_of(token)
        return Corruption(
            "cache write",
            f"{write.layer}: the {name} at position {step.position_of(token)} (slot"
            f" {int(step.slot_mapping[token])}), head {head}, element {element} is"
            f" {float(stored[index, head, element]):.6g} in the cache: expected"
            f" {float(expected[side][index, 0, head, element]):.6g}",
            row,
            evidence={
                "kind": "write",
                "given": {key: one.cpu() for key, one in given.items()},
                "found": {key: one.cpu() for key, one in found.items()},
                "scales": {key: _plain(one) for key, one in write.scales.items()},
                "fp8_steps": write.fp8_steps,
                "tokens": list(tokens),
            },
        )
    return None


@dataclass(frozen=True)
class WatchedBlock:
    """The content of a full block, to be compared in a later step.

    Args:
        layer: the layer.
        group: the layers that share its metadata.
        block_id: the block.
        column: index of the block in the row of the request.
        step: number of the step in which it was copied.
        caches: key cache and value cache of the layer.
        before: copies of the block in both, [block_size, kv_heads, head_size] each.
    """

    layer: str
    group: str
    block_id: int
    column: int
    step: int
    caches: tuple[Tensor, Tensor]
    before: tuple[Tensor, Tensor]

    @classmethod
    def of(
        cls,
        layer: str,
        step: HostStep,
        block_id: int,
        column: int,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> "WatchedBlock":
        """Return a block with a copy of its content."""
        caches = (key_cache, value_cache)
        before = (key_cache[block_id].clone(), value_cache[block_id].clone())
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
    names = ("key", "value")
    for name, cache, before in zip(names, watched.caches, watched.before, strict=True):
        now = cache[block_id]
        differs = _differs(now, before, 0)
        if not bool(differs.any()):
            continue
        offset, head, element = differs.nonzero()[0].tolist()
        return Corruption(
            "unchanged blocks",
            f"{watched.layer}: the {name} at position"
            f" {column * step.block_size + offset} (block {block_id}, offset {offset}),"
            f" head {head}, element {element} changed from"
            f" {float(before[offset, head, element]):.6g} to"
            f" {float(now[offset, head, element]):.6g} after step {watched.step},"
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
