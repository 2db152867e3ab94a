"""Law of attention: sampled rows stay within their error budget, measured against the reference.

A sampled row is one query token of one request. It is computed again from the content of the
cache, in float64 and in the dtype of the output, as in `contract/budgets.py`. Only the blocks of
the sampled requests are gathered.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions, unpack_options
from ...contract.budgets import Verdict, judge_rows
from ...contract.cache_formats import TENSOR_SCALE_DTYPES, find_format
from ..findings import Corruption
from ..step import HostStep
from .score_errors import move_row


@dataclass(frozen=True)
class RecordedCall:
    """One layer's call of paged attention.

    Args:
        layer: name of the layer.
        query: [rows, query_heads, head_size] the queries of the sampled tokens.
        output: [rows, query_heads, value_head_size] what the engine computed for them.
        key_cache, value_cache: [num_blocks, block_size, kv_heads, head_size].
        scale: Optional. Factor of the dot products. If None, 1 / sqrt(head_size).
        options: the options of the whole call.
        implementation: name of what computed it.
        query_scale: Optional. Factor of an FP8 query, whose kernel rounds softmax weights to FP8
            too. If None, rows with an FP8 query are not recomputed.
        query_rope: Optional. [rows, query_heads, rope_size] the elements of each query after those
            of `query`, as in latent attention. If None, the queries are whole.
    """

    layer: str
    query: Tensor
    output: Tensor
    key_cache: Tensor
    value_cache: Tensor
    scale: float | None
    options: AttentionOptions
    implementation: str
    query_scale: Tensor | None = None
    query_rope: Tensor | None = None

    def take(self, rows: Tensor) -> "RecordedCall":
        """Return the call with some rows alone, [rows] int64, and with whole queries."""
        query, output = take_rows(self.query, rows), take_rows(self.output, rows)
        if self.query_rope is not None:
            query = torch.cat([query, take_rows(self.query_rope, rows)], dim=-1)
        return replace(self, query=query, query_rope=None, output=output)


@dataclass(frozen=True)
class RowCase:
    """Some rows of attention with everything that they depend on.

    Args:
        layer, query, output, scale, implementation: as in `RecordedCall`.
        key_blocks, value_blocks: [blocks, block_size, kv_heads, head_size] content of the cache.
        block_table: [rows, max_blocks] indices into these blocks.
        seq_lens: [rows] keys up to and including the query's own.
        options: the options of these rows.
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

        exact = attend(torch.float64, torch.float64, values)
        # the budget without what torch loses, and with the result's own magnitude, is the smallest
        dtype, error = self.output.dtype, self.weight_error
        least = judge_rows(self.output, exact, exact, dtype, weight_error=error)
        if least.ok:
            return least, exact
        if find_format(values.dtype).is_quantised:
            absolute = values.float().abs().to(values.dtype)
        else:
            absolute = values.abs()
        same = attend(dtype, dtype, values)
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
        scales = [
            1.0 if scale is None else torch.as_tensor(scale).to(self.query.device)
            for scale in (self.options.k_scale, self.options.v_scale)
        ]
        found = []
        for query, table, length in zip(
            self.query, self.block_table.long(), self.seq_lens.tolist(), strict=True
        ):
            key, value = (
                take_rows(blocks, table).flatten(0, 1)[:length].double()
                * (of_head.reshape(-1, 1) if isinstance(of_head, Tensor) else of_head)
                for blocks, of_head in zip(
                    (self.key_blocks, self.value_blocks), scales, strict=True
                )
            )
            found.append(move_row(query, key, value, scale, self.options))
        moved, ranges = zip(*found, strict=True)
        return torch.stack(moved), torch.stack(ranges, 1)

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


_TENSORS = ("query", "output", "key_blocks", "value_blocks", "block_table", "seq_lens")


def why_not_recomputed(call: RecordedCall) -> str:
    """Return why rows of such a call are not recomputed; empty if they are."""
    options, output = call.options, call.output
    if call.query.dtype in TENSOR_SCALE_DTYPES and call.query_scale is None:
        return "an FP8 query"
    if find_format(call.key_cache.dtype, options.k_scale).is_measured:
        return "a scale per token and head"
    for name in ("tree_mask", "query_ranges", "out_scale"):
        if getattr(options, name) is not None:
            return name
    if output.dtype in TENSOR_SCALE_DTYPES:
        return "an FP8 output"
    if _any_not_causal(options) and options.given_by_position:
        return "positions without causality"
    return ""


def _any_not_causal(options: AttentionOptions) -> bool:
    causal = options.with_causal(True).causal
    return not (bool(causal.all()) if isinstance(causal, Tensor) else causal)


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


def gather_rows(call: RecordedCall, step: HostStep, tokens: Sequence[int]) -> RowCase:
    """Return the case of some rows: only the blocks of their requests, renumbered.

    Args:
        call: the call; its queries and outputs are those of the tokens.
        step: the step.
        tokens: [rows] the new tokens.
    """
    device, query = call.query.device, call.query
    weight_error = 0.0
    if call.query_scale is not None and query.dtype in TENSOR_SCALE_DTYPES:
        weight_error = torch.finfo(query.dtype).eps / 2
        query = query.float() * call.query_scale
    causal = call.options.with_causal(True).causal
    rows = [step.row_of(token) for token in tokens]
    flags = (
        [bool(flag) for flag in causal[rows]]
        if isinstance(causal, Tensor)
        else [bool(causal)] * len(rows)
    )
    # a causal query attends to nothing after it, so its sequence can end there
    lens = [
        step.position_of(token) + 1 if flag else int(step.seq_lens[row])
        for token, row, flag in zip(tokens, rows, flags, strict=True)
    ]
    width = max(-(-length // step.block_size) for length in lens)
    table = np.maximum(step.block_table[rows, :width], 0)
    used = np.arange(width) * step.block_size < np.array(lens)[:, None]
    blocks, index = np.unique(np.where(used, table, table[0, 0]), return_inverse=True)
    ids = torch.from_numpy(blocks).to(device)
    return RowCase(
        layer=call.layer,
        query=query,
        output=call.output,
        key_blocks=call.key_cache[ids],
        value_blocks=call.value_cache[ids],
        block_table=torch.from_numpy(
            index.reshape(len(rows), width).astype(np.int32)
        ).to(device),
        seq_lens=torch.tensor(lens, dtype=torch.int32).to(device),
        scale=call.scale,
        options=replace(call.options, causal=torch.tensor(flags).to(device))
        if not all(flags)
        else replace(call.options, causal=None),
        implementation=call.implementation,
        weight_error=weight_error,
    )


def check_attention(
    call: RecordedCall,
    step: HostStep,
    tokens: Sequence[int],
    paged_attention: Callable[..., Tensor],
) -> Corruption | None:
    """Return a violation if a sampled row is outside its error budget.

    Args:
        call, step, tokens: as in `gather_rows`.
        paged_attention: the reference's operation.
    """
    if why_not_recomputed(call) or not len(tokens):
        return None
    case = gather_rows(call, step, tokens)
    verdict, exact = case.judge(paged_attention)
    if verdict.ok:
        return None
    token = tokens[verdict.row]
    output = call.output[verdict.row]
    errors = (output.double() - exact[verdict.row]).abs().nan_to_num(torch.inf)
    head, element = divmod(int(errors.argmax()), output.shape[1])
    worst = case.one(verdict.row)
    found = float(output[head, element])
    right = float(exact[verdict.row][head, element])
    where = (
        f"head {head}, element {element} is {found:.6g}, the reference has {right:.6g}"
    )
    if not math.isfinite(right):
        what = f"has no finite result, because of {_not_finite(worst)}"
    elif not math.isfinite(found):
        what = "is not finite"
    else:
        what = f"has error {verdict.error:.3g}: expected at most {verdict.budget:.3g}"
    return Corruption(
        "attention",
        f"{call.layer}: attention of position {step.position_of(token)} {what}; {where}",
        step.row_of(token),
        evidence={"kind": "attention", "rows": worst.as_dict()},
    )


def _not_finite(row: RowCase) -> str:
    """Return which number that a row is computed from is NaN or infinite, in words."""
    if not torch.isfinite(row.query.float()).all():
        return "its query, which holds NaN or infinity"
    length = int(row.seq_lens[0])
    for name, blocks in (("key", row.key_blocks), ("value", row.value_blocks)):
        numbers = blocks.float().flatten(0, 1)[:length].flatten(1)
        wrong = (~torch.isfinite(numbers)).any(1).nonzero()
        if len(wrong):
            return (
                f"the {name} of position {int(wrong[0])}, which holds NaN or infinity"
            )
    return "sums that are too large, or of its options"
