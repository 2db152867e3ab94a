"""Rows of attention with everything that they depend on, to be computed again or stored.

A sampled row is one query token of one request. It is computed again from the content of the
cache, in float64 and in the dtype of the output, as in `contract/budgets.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions, unpack_options
from ...contract.budgets import Verdict, judge_rows
from ...contract.cache_formats import find_format
from ...contract.operations import load_implementation
from .score_errors import move_row


@dataclass(frozen=True)
class RowCase:
    """Some rows of attention with everything that they depend on.

    Args:
        layer, query, output, scale, implementation: as in `RecordedCall`.
        key_blocks, value_blocks: [blocks, block_size, kv_heads, head_size] content of the cache.
        block_table: [rows, max_blocks] indices into these blocks.
        seq_lens: [rows] keys up to and including the query's own.
        options: the options of these rows. Scales that are measured are those of the blocks.
        weight_error: as in `row_budgets`.
    """

    layer: str
    query: Tensor
    output: Tensor
    key_blocks: Tensor
    value_blocks: Tensor
    block_table: Tensor
    seq_lens: Tensor
    scale: float | None
    options: AttentionOptions
    implementation: str
    weight_error: float = 0.0

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `paged_attention` for these rows."""
        rows, device = len(self.query), self.query.device
        return {
            "query": self.query,
            "key_cache": self.key_blocks,
            "value_cache": self.value_blocks,
            "block_table": self.block_table,
            "query_start_loc": torch.arange(rows + 1, dtype=torch.int32, device=device),
            "seq_lens": self.seq_lens,
            "max_query_len": 1,
            "max_seq_len": int(self.seq_lens.max()),
            "scale": self.scale,
            "options": self.options,
        }

    def judge(self, paged_attention: Callable[..., Tensor]) -> tuple[Verdict, Tensor]:
        """Return the worst row relative to its error budget, and the result in float64.

        Args:
            paged_attention: the reference's operation.
        """
        given = self.arguments()
        given["options"] = replace(self.options, batch_invariant=False)
        shape, device = self.output.shape, self.output.device
        values = self.value_blocks

        def attend(dtype: torch.dtype, out: torch.dtype, values: Tensor) -> Tensor:
            result = torch.empty(shape, dtype=out, device=device)
            arguments = {**given, "value_cache": values, "out": result}
            return paged_attention(**arguments, compute_dtype=dtype)

        # codes times their scale are exact in float64
        exact = attend(torch.float64, torch.float64, values)
        # the budget without what torch loses, and with the result's own magnitude, is the smallest
        dtype, error = self.output.dtype, self.weight_error
        least = judge_rows(self.output, exact, exact, dtype, weight_error=error)
        if least.ok:
            return least, exact
        same = attend(dtype, dtype, values)
        if self.is_measured:
            key, absolute = self.numbers(torch.float32)
            none = dict.fromkeys(SCALES_OF_CACHES)
            plain = replace(given["options"], **none)
            given |= {"query": self.query.float(), "key_cache": key, "options": plain}
            absolute = absolute.abs()
        elif find_format(values.dtype).is_quantised:
            absolute = values.float().abs().to(values.dtype)
        else:
            absolute = values.abs()
        magnitude = attend(torch.float32, torch.float32, absolute)
        moved, value_range = self.score_errors()
        terms = (magnitude, None, moved, value_range)
        verdict = judge_rows(
            self.output, exact, same, dtype, *terms, weight_error=error
        )
        return verdict, exact

    def score_errors(self) -> tuple[Tensor, Tensor]:
        """Return how far rounded scores may move each row, and the range of its values.

        Returns:
            [rows, query_heads, value_head_size], and [2, rows, ...] the same.
        """
        scale = self.query.shape[2] ** -0.5 if self.scale is None else self.scale
        given = (self.options.k_scale, self.options.v_scale)
        caches = (self.key_blocks, self.value_blocks)
        if self.is_measured:  # numbers are multiplied already
            given, caches = (None, None), self.numbers(torch.float64)
        scales = [
            1.0 if scale is None else torch.as_tensor(scale).to(self.query.device)
            for scale in given
        ]
        found = []
        for query, table, length in zip(
            self.query, self.block_table.long(), self.seq_lens.tolist(), strict=True
        ):
            key, value = (
                take_rows(blocks, table).flatten(0, 1)[:length].double()
                * (of_head.reshape(-1, 1) if isinstance(of_head, Tensor) else of_head)
                for blocks, of_head in zip(caches, scales, strict=True)
            )
            found.append(move_row(query, key, value, scale, self.options))
        moved, ranges = zip(*found, strict=True)
        return torch.stack(moved), torch.stack(ranges, 1)

    @property
    def is_measured(self) -> bool:
        """Whether scales are stored with the codes."""
        return find_format(self.key_blocks.dtype, self.options.k_scale).is_measured

    def numbers(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the blocks as numbers, as the reference reads them.

        Args:
            dtype: of the numbers.

        Returns:
            [blocks, block_size, kv_heads, head_size] for keys and for values.
        """
        if not self.is_measured:
            return self.key_blocks.to(dtype), self.value_blocks.to(dtype)
        device, slots = self.key_blocks.device, self.key_blocks.shape[:2]
        key, value = load_implementation("reference").gather_cache(
            self.key_blocks,
            self.value_blocks,
            torch.arange(slots[0], dtype=torch.int32, device=device)[None],
            torch.tensor([0, slots.numel()], dtype=torch.int32, device=device),
            slots.numel(),
            dtype=dtype,
            **{name: getattr(self.options, name) for name in SCALES_OF_CACHES},
        )
        return key.unflatten(0, slots), value.unflatten(0, slots)

    def one(self, row: int) -> "RowCase":
        """Return the case of one row, with its own blocks alone."""
        blocks = self.block_table[row : row + 1].long()
        used = -(-int(self.seq_lens[row]) // self.key_blocks.shape[1])
        own = blocks[0, :used]
        return replace(
            self,
            query=self.query[row : row + 1],
            output=self.output[row : row + 1],
            key_blocks=self.key_blocks[own],
            value_blocks=self.value_blocks[own],
            options=take_scales(self.options, self.key_blocks, own),
            block_table=torch.arange(used, dtype=torch.int32, device=own.device)[None],
            seq_lens=self.seq_lens[row : row + 1],
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the case as tensors on the host and plain values, to be stored."""
        stored: dict[str, Any] = {
            name: getattr(self, name).cpu().clone() for name in _TENSORS
        }
        options = unpack_options(self.options)
        stored["options"] = {
            name: option.cpu() if isinstance(option, Tensor) else option
            for name, option in options.items()
        }
        for name in ("layer", "scale", "implementation", "weight_error"):
            stored[name] = getattr(self, name)
        return stored

    @classmethod
    def of_dict(cls, stored: dict[str, Any], device: str) -> "RowCase":
        """Return the case that `as_dict` stored, on a device."""
        tensors = {name: stored[name].to(device) for name in _TENSORS}
        options: dict[str, Any] = {
            name: option.to(device) if isinstance(option, Tensor) else option
            for name, option in stored["options"].items()
        }
        return cls(
            layer=stored["layer"],
            scale=stored["scale"],
            implementation=stored["implementation"],
            # cases of earlier versions have none
            weight_error=stored.get("weight_error", 0.0),
            options=AttentionOptions(**options),
            **tensors,
        )


SCALES_OF_CACHES = ("k_scale", "v_scale", "k_global_scale", "v_global_scale")
"""The options with what the codes of a cache are multiplied by."""

_TENSORS = ("query", "output", "key_blocks", "value_blocks", "block_table", "seq_lens")


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return rows of a tensor of any dtype.

    Args:
        tensor: [tokens, ...].
        rows: [rows] int64 on the same device.
    """
    if find_format(tensor.dtype).is_quantised:
        # torch selects bytes on every device
        return tensor.view(torch.uint8).index_select(0, rows).view(tensor.dtype)
    return tensor.index_select(0, rows)


def take_scales(
    options: AttentionOptions, key_cache: Tensor, blocks: Tensor
) -> AttentionOptions:
    """Return options with the scales of some blocks alone, if these are stored with the codes.

    Args:
        options: the options.
        key_cache: tells the format.
        blocks: [blocks] int64.
    """
    k_scale, v_scale = options.k_scale, options.v_scale
    if not find_format(key_cache.dtype, k_scale).is_measured:
        return options
    assert isinstance(k_scale, Tensor) and isinstance(v_scale, Tensor)
    return replace(options, k_scale=k_scale[blocks], v_scale=v_scale[blocks])
