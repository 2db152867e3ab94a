"""Caches with a scale per token and head: writes, and attention over them."""

from typing import Any

import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.cache_formats import FORMATS, CacheFormat, split_page
from pagetwin.reference.cache.formats.int4_per_token_head import (
    block_of,
    drawn_signs,
    hadamard,
    rotate,
    signs,
)
from torch import Tensor

from golden.adapters.attention import per_head
from golden.cases import adapter


def caches_before(
    inputs: dict[str, Any], form: CacheFormat
) -> tuple[Tensor | None, list[Tensor]]:
    """Return the pages of a case, if it has pages, and the caches and scales in them."""
    blocks, block_size = inputs["num_blocks"], inputs["block_size"]
    heads, size = inputs["key"].shape[1:]
    value_size, device = inputs["value"].shape[2], inputs["key"].device
    byte, scale = inputs["fill"]["cache_byte"], inputs["fill"]["scale"]
    if inputs["layout"] == "separate":
        shape = (blocks, block_size, heads)
        codes = [
            torch.full((*shape, width), byte, dtype=torch.uint8, device=device).view(
                form.dtype
            )
            for width in (form.elements(size), form.elements(value_size))
        ]
        return None, [*codes, *(torch.full(shape, scale, device=device) for _ in "kv")]
    is_by_head = inputs["layout"] == "inline_HN"
    order = (heads, block_size) if is_by_head else (block_size, heads)
    shape = (blocks, *order, form.elements(size) + form.elements(value_size) + 8)
    page = torch.full(shape, byte, dtype=torch.uint8, device=device)
    slots = page.transpose(1, 2) if is_by_head else page
    parts = split_page(slots, size, value_size, form)
    for scales in parts[2:]:
        scales.fill_(scale)
    return page, [*parts]


@adapter("v033_reshape_and_cache_int8_per_token_head", on_device=True)
def write_int8(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return write(twin, inputs, FORMATS["int8_per_token_head"])


@adapter("v033_reshape_and_cache_fp8_per_token_head", on_device=True)
def write_fp8(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return write(twin, inputs, FORMATS["fp8_per_token_head"])


@adapter("v033_reshape_and_cache_int4_per_token_head", on_device=True)
def write_int4(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    found = write(twin, inputs, FORMATS["int4_per_token_head_vllm"])
    for name in ("k", "v"):
        if f"{name}_scale_cache" in found:
            scale = found[f"{name}_scale_cache"]
            found[f"{name}_scale_bits"] = scale.view(torch.int32)
    return found


def write(twin: Any, inputs: dict[str, Any], form: CacheFormat) -> dict[str, Any]:
    """Return the caches of a case after its write."""
    page, caches = caches_before(inputs, form)
    tokens = []
    for name in ("key", "value"):
        new = inputs[name]
        if strides := inputs.get(f"{name}_stride"):
            strided = new.new_empty_strided(new.shape, strides)
            new = strided.copy_(new)
        tokens.append(new)
    twin.reshape_and_cache(
        *tokens, *caches[:2], inputs["slot_mapping"], *caches[2:], form.name
    )
    if page is not None:
        by_head = inputs["layout"] == "inline_HN"
        dims = "block,head,slot,byte" if by_head else "block,slot,head,byte"
        return {"page_bytes": page, "page_dims": dims}
    names = ("key_cache", "value_cache", "k_scale_cache", "v_scale_cache")
    recorded = [recorded_codes(codes) for codes in caches[:2]]
    return dict(zip(names, [*recorded, *caches[2:]], strict=True))


def recorded_codes(codes: Tensor) -> Tensor:
    """Return codes as they are recorded: FP8 codes as bytes."""
    return codes if codes.dtype == torch.int8 else codes.view(torch.uint8)


@adapter("v033_unified_attention_fp8_per_token_head", on_device=True)
@adapter("v033_unified_attention_int4_per_token_head", on_device=True)
@adapter("v033_unified_attention_int8_per_token_head", on_device=True)
def attention(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    starts, seq_lens = inputs["cu_seqlens_q"], inputs["seq_lens"]
    code = FORMATS[inputs["kv_cache_dtype"]].dtype
    return {
        "out": twin.paged_attention(
            inputs["query"],
            inputs["key_cache"].view(code),
            inputs["value_cache"].view(code),
            inputs["block_table"],
            starts,
            seq_lens,
            int(starts.diff().max()),
            int(seq_lens.max()),
            scale=inputs["softmax_scale"],
            options=AttentionOptions(
                causal=inputs["causal"],
                sliding_window=inputs["sliding_window"],
                logits_soft_cap=inputs["softcap"] or None,
                alibi_slopes=per_head(inputs.get("alibi_slopes")),
                sinks=per_head(inputs.get("sinks")),
                k_scale=inputs["k_scale_cache"],
                v_scale=inputs["v_scale_cache"],
            ),
        )
    }


@adapter("v033_int4_rht")
def rotation(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the signs or the transforms of the rotation, which both twins share by the law."""
    if "d" in inputs:
        drawn = drawn_signs()
        size = inputs["d"]
        return {"signs": drawn[:size].int().tolist(), "prefix_of_512": True}
    rows = inputs["x"]
    size = rows.shape[-1]
    return {
        "forward": rotate(rows),
        "inverse_of_x": hadamard(rows) * signs(size, rows.device),
        "norm_squared": block_of(size),
    }
