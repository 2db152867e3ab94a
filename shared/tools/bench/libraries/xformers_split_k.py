"""xFormers: its split-K operator over pages, for decodes.

The operator is written in Triton. xFormers' dispatcher rejects CUDA inputs if torch has another
CUDA version than xFormers' compiled part, so the operator is called directly. It loads BLOCK_N keys
at a time, which must divide the page.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from ..inputs import Inputs
from .library import (
    AttentionLibrary,
    Declined,
    Prepared,
    decline_features,
    why_no_modules,
)

OPERATOR = "xformers.ops.fmha.triton_splitk"
TILE_SIZES = (64, 32, 16)


class XFormers(AttentionLibrary):
    """xFormers' `triton_splitk.FwOp` with a paged mask of one new token per request."""

    name, title, package = "xformers", "xFormers split-K", "xformers"

    def missing(self) -> str:
        if why := why_no_modules(OPERATOR, install="'pagetwin[xformers]'"):
            return why
        operator = importlib.import_module(OPERATOR).FwOp.OPERATOR
        return "" if operator else "it finds no usable triton"

    def prepare(self, inputs: Inputs) -> Prepared:
        workload = inputs.workload
        if workload.kind not in ("decode", "cross", "mixed"):
            raise Declined("its paged operator is for decodes")
        decline_features(workload)
        if inputs.max_query_len > 1:
            raise Declined("its paged mask here has one new token per request")
        if workload.is_quantised:
            raise Declined("it has no scales for an FP8 cache")
        if workload.sliding_window is not None:
            raise Declined("its paged mask has no sliding window")
        if workload.block_size % TILE_SIZES[-1]:
            raise Declined(f"it loads at least {TILE_SIZES[-1]} keys of a block")
        fmha: Any = importlib.import_module("xformers.ops.fmha")
        operator = _operator(workload.block_size, is_interpreted=self.device == "cpu")
        mask = _mask(inputs)
        kv_heads, head_size = workload.kv_heads, workload.head_size
        group_size = workload.query_heads // kv_heads
        # the interpreter's bfloat16 arithmetic is wrong, so its inputs are float32
        dtype = torch.float32 if self.device == "cpu" else workload.dtype
        # the cache as one sequence of slots; the heads of a group share keys by stride 0
        slots = (1, -1, kv_heads, 1, head_size)
        group = (-1, -1, -1, group_size, -1)

        def call() -> Tensor:
            given = fmha.Inputs(
                query=inputs.query.to(dtype).view(
                    1, -1, kv_heads, group_size, head_size
                ),
                key=inputs.key_cache.to(dtype).reshape(slots).expand(group),
                value=inputs.value_cache.to(dtype).reshape(slots).expand(group),
                attn_bias=mask,
                scale=head_size**-0.5,
            )
            result, _ = operator.apply(given, needs_gradient=False)
            rows: Tensor = result.reshape(inputs.query.shape).to(workload.dtype)
            return rows

        return Prepared(call, note="mask prepared in advance")


def _mask(inputs: Inputs) -> Any:
    """Return xFormers' mask of a batch of decodes."""
    biases: Any = importlib.import_module("xformers.ops.fmha.attn_bias")
    lengths = list(inputs.workload.kv_lens)
    # one tensor of the mask is created on the default device, whatever `device` says
    with torch.device(inputs.device):
        return biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            q_seqlen=[1] * len(lengths),
            kv_seqlen=lengths,
            page_size=inputs.workload.block_size,
            block_tables=inputs.block_table,
            device=inputs.device,
        )


def _operator(block_size: int, is_interpreted: bool) -> Any:
    """Return the operator with the largest tile of keys that divides the page."""
    base: Any = importlib.import_module(OPERATOR).FwOp
    fields: dict[str, Any] = {
        "BLOCK_N": next(keys for keys in TILE_SIZES if block_size % keys == 0)
    }
    if is_interpreted:
        # the original reads the CUDA capability of the device
        fields["get_extra_args"] = classmethod(
            lambda cls, **shape: {"BLOCK_M": cls.BLOCK_M, "BLOCK_N": cls.BLOCK_N}
        )
    return type("PagedSplitK", (base,), fields)
