"""Law of attention: sampled rows stay within their error budget, measured against the reference.

A sampled row is one query token of one request (`row_case.py`). Only the blocks of the sampled
requests are gathered.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.cache_formats import TENSOR_SCALE_DTYPES, find_format
from ...contract.latent_formats import find_record_heads
from ..findings import Corruption
from ..step import HostStep
from .row_case import RowCase, take_rows, take_scales
from .selection import SelectedKeys, gather_selected


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
        selection: Optional. What the tokens select, in sparse attention. If None, they attend to
            all keys that are visible to them.
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
    selection: SelectedKeys | None = None

    @property
    def stored_scales(self) -> tuple[Any, ...]:
        """The scales of keys and values if the cache has them in tensors of their own."""
        if find_record_heads(self.key_cache, self.value_cache) is not None:
            return ()
        scales = (self.options.k_scale, self.options.v_scale)
        is_measured = find_format(self.key_cache.dtype, scales[0]).is_measured
        return scales if is_measured else ()

    def take(self, rows: Tensor) -> "RecordedCall":
        """Return the call with some rows alone, [rows] int64, and with whole queries."""
        query, output = take_rows(self.query, rows), take_rows(self.output, rows)
        if self.query_rope is not None:
            query = torch.cat([query, take_rows(self.query_rope, rows)], dim=-1)
        selection = self.selection and self.selection.take(rows)
        return replace(
            self, query=query, query_rope=None, output=output, selection=selection
        )


def why_not_recomputed(call: RecordedCall) -> str:
    """Return why rows of such a call are not recomputed; empty if they are."""
    options, output = call.options, call.output
    if call.query.dtype in TENSOR_SCALE_DTYPES and call.query_scale is None:
        return "an FP8 query"
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


def gather_rows(call: RecordedCall, step: HostStep, tokens: Sequence[int]) -> RowCase:
    """Return the case of some rows: only the blocks of their requests, renumbered.

    Args:
        call: the call; its queries and outputs are those of the tokens.
        step: the step.
        tokens: [rows] the new tokens.
    """
    if call.selection is not None:
        return gather_selected(call, call.selection, step, tokens)
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
    options = take_scales(call.options, call.key_cache, ids)
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
        options=replace(options, causal=torch.tensor(flags).to(device))
        if not all(flags)
        else replace(options, causal=None),
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
    for name, blocks in zip(("key", "value"), row.numbers(torch.float32), strict=True):
        numbers = blocks.flatten(0, 1)[:length].flatten(1)
        wrong = (~torch.isfinite(numbers)).any(1).nonzero()
        if len(wrong):
            return (
                f"the {name} of position {int(wrong[0])}, which holds NaN or infinity"
            )
    return "sums that are too large, or of its options"
