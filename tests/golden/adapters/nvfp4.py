"""The format nvfp4: its pages, and the rule of its codes."""

from typing import Any

import torch
from pagetwin.contract.cache_formats import FORMATS
from pagetwin.contract.nvfp4_pages import split_nvfp4_cache, split_nvfp4_page
from pagetwin.reference.cache.formats.nvfp4 import encode_e2m1, load, meaning, store
from torch import Tensor

from golden.cases import adapter

NVFP4 = FORMATS["nvfp4"]


@adapter("v033_nvfp4_kv_layout")
def pages(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of a key or value, or the views of a page, which both twins share."""
    size = inputs["head_size"]
    if "block_size" not in inputs:
        return {"full_dim": NVFP4.row_bytes(size)}
    slots, heads = inputs["block_size"], inputs["num_kv_heads"]
    half = heads * slots * NVFP4.row_bytes(size)
    if "physical_layout" not in inputs:
        # vLLM splits the keys and the values of pages one by one
        page = torch.zeros(2, half, dtype=torch.uint8)
        both = torch.cat([page, page], 1)
        key, _, k_scale, _ = split_nvfp4_page(both, slots, heads, size, by_head=True)
        found = {"data": view_of(key, True), "scale": view_of(k_scale, True)}
        for view in found.values():
            view["strides"][0] = half
        return found
    layout, width = inputs["physical_layout"], NVFP4.row_bytes(size)
    by_head = layout == "HND"
    order = (2 * heads, slots) if by_head else (slots, 2 * heads)
    cache = torch.zeros(inputs["num_blocks"], *order, width, dtype=torch.uint8)
    parts = split_nvfp4_cache(cache if by_head else cache.transpose(1, 2), size)
    names = ("k_data", "v_data", "k_scale", "v_scale")
    views = [view_of(part, by_head) for part in parts]
    return {"layout": layout, "block_bytes": 2 * half} | dict(
        zip(names, views, strict=True)
    )


def view_of(part: Tensor, by_head: bool) -> dict[str, Any]:
    """Return the first byte, the shape and the strides of a part of a page as it is stored."""
    stored = part.transpose(1, 2) if by_head else part
    return {
        "offset": stored.storage_offset(),
        "shape": list(stored.shape),
        "strides": list(stored.stride()),
    }


@adapter("v033_ref_nvfp4_quant")
def codes(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return what codes mean and the scales of blocks. vLLM's global scale is the inverse."""
    if "global_scale" not in inputs:
        return {"values": meaning(encode_e2m1(inputs["x"]), torch.float32)}
    stored, scales = store(inputs["x"], 1 / inputs["global_scale"], torch.uint8)
    values = load(stored, torch.ones_like(scales), torch.float32)
    return {"values": values, "block_scales": scales.float()}
