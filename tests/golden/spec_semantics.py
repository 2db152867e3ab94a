"""Executable semantics of vLLM 0.33's specs of caches, layouts and masks, as in semantics.py.

They are written from the rules that vLLM's results follow, without the classes of this project.
"""

from fractions import Fraction
from math import floor, gcd
from typing import Any

import torch

from .semantics import Model

SPEC_MODELS: dict[str, Model] = {}
BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "uint8": 1,
    "int8": 1,
}


def models(file: str) -> Any:
    """Register the model of a case file."""

    def register(model: Model) -> Model:
        SPEC_MODELS[file] = model
        return model

    return register


def is_latent(inputs: dict[str, Any]) -> bool:
    return bool(inputs["class"] == "MLAAttentionSpec")


def content(inputs: dict[str, Any], tokens: int) -> int:
    """Return the bytes of some tokens of all heads."""
    size_v = 0 if is_latent(inputs) else inputs.get("head_size_v", inputs["head_size"])
    cell = (inputs["head_size"] + size_v) * BYTES[inputs["dtype"]]
    cell = inputs.get("state_content_bytes") or cell
    heads = inputs.get("num_head_slots") or inputs.get("num_kv_heads", 1)
    return int(heads * states(inputs, tokens) * cell)


def states(inputs: dict[str, Any], tokens: int) -> int:
    return floor(tokens / Fraction(inputs.get("tokens_per_state", 1)))


def padded(inputs: dict[str, Any]) -> int | None:
    """Return the padded size of a page, given or rounded up; None without padding."""
    page, multiple = content(inputs, inputs["block_size"]), inputs.get("alignment")
    if multiple and page % multiple:
        return page + multiple - page % multiple
    return inputs.get("page_size_padded")


def page_of(inputs: dict[str, Any]) -> Any:
    """Return the bytes of a page."""
    page, with_padding = content(inputs, inputs["block_size"]), padded(inputs)
    if with_padding is None:
        return page
    if with_padding < page:
        return {"raises": "AssertionError", "message": ""}
    return with_padding


def stored(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a spec with the bytes that a backend adds to it for scales in the page."""
    mode = inputs.get("kv_quant_mode", "NONE")
    both = (inputs["head_size"], inputs.get("head_size_v") or inputs["head_size"])
    if "backend" not in inputs or mode in ("NONE", "FP8_PER_TENSOR"):
        return inputs
    if mode.startswith("NVFP4"):
        # half a byte per channel, and a byte per 16 of them; keys and values are slots of their own
        slots = 2 * inputs.get("num_kv_heads", 1)
        cell = sum(size // 2 + size // 16 for size in both) // 2
        return inputs | {"num_head_slots": slots, "state_content_bytes": cell}
    codes = sum(size // 2 if mode.startswith("INT4") else size for size in both)
    return inputs | {"state_content_bytes": codes + 8}


@models("v033_kv_cache_spec_sizes")
def sizes(inputs: dict[str, Any]) -> dict[str, Any]:
    inputs = stored(inputs)
    size, wanted = inputs["block_size"], inputs.get("block_stride_alignment")
    if isinstance(wanted, dict):
        tokens = gcd(wanted["multiple_of"], size)
        stride = 1 if tokens == size else content(inputs, tokens)
    else:
        stride = 1 if wanted is None else wanted
        if stride <= 0:
            raise ValueError
    heads = inputs.get("num_head_slots") or inputs.get("num_kv_heads", 1)
    count, real = states(inputs, size), content(inputs, size)
    found: dict[str, Any] = {
        "page_size_bytes": page_of(inputs),
        "real_page_size_bytes": real,
        "num_heads": heads,
        "num_states": count,
        "tokens_per_state": inputs.get("tokens_per_state", 1),
        "page_size_padded": padded(inputs),
        "state_content_bytes": inputs.get("state_content_bytes"),
        "num_head_slots": inputs.get("num_head_slots"),
        "block_stride_alignment_bytes": stride,
    }
    if count:
        found["state_content_size_bytes"] = real // heads // count
        shape = [3, heads, count, real // heads // count]
        found["logical_shape_bytes_3_blocks"] = shape
    if "sliding_window" in inputs:
        kept = inputs["sliding_window"] - 1 + inputs.get("extra_retained_tokens", 0)
        found["num_retained_tokens"] = kept
    return found


def cdiv(number: int, divisor: int) -> int:
    return (number + divisor - 1) // divisor


@models("v033_kv_cache_spec_memory")
def memory(inputs: dict[str, Any]) -> dict[str, Any]:
    config, size, page = inputs["config"], inputs["block_size"], page_of(inputs)
    longest, in_flight = config["max_model_len"], config["max_in_flight_tokens"]
    ranks = config["decode_context_parallel_size"]
    shares = ranks if inputs.get("dcp_sharded", True) else 1
    found = {
        "page_size_bytes": page,
        "max_num_blocks_per_req": cdiv(longest, size * shares),
    }
    blocks = cdiv(cdiv(longest, shares), size)
    if inputs["class"] == "CrossAttentionSpec":
        blocks = cdiv(config["max_num_encoder_input_tokens"], size)
    if "attention_chunk_size" in inputs:
        kept = min(inputs["attention_chunk_size"] + in_flight, longest)
        found["max_admission_blocks_per_request"] = blocks = cdiv(kept, size)
    if "sliding_window" in inputs:
        extra = inputs.get("extra_retained_tokens", 0)
        kept = min(inputs["sliding_window"] - 1 + extra + in_flight, longest)
        found["max_admission_blocks_per_request"] = blocks = cdiv(kept, size) + 1
        if shares > 1:
            error = {"raises": "AssertionError", "message": ""}
            return found | {"max_memory_usage_bytes": error}
    is_page = isinstance(page, int)
    return found | {"max_memory_usage_bytes": blocks * page if is_page else page}


@models("v033_kv_cache_spec_merge")
def merge(inputs: dict[str, Any]) -> dict[str, Any]:
    if "specs" not in inputs:
        return copy(inputs)
    specs, visible = inputs["specs"], {}
    if inputs["class"] == "FullAttentionSpec":
        for name in ("sliding_window", "attention_chunk_size"):
            given = {fields.get(name) for fields in specs} - {None}
            assert len(given) <= 1
            visible[name] = given.pop() if given else None
        assert None in visible.values()
    kept = [{k: v for k, v in fields.items() if k not in visible} for fields in specs]
    assert all(rest == kept[0] for rest in kept)
    spec = {"class": inputs["class"], **specs[0]}
    merged = {**kept[0], **visible, "page_size_bytes": page_of(spec)}
    # the padded size replaces the alignment
    return {**merged, "alignment": None} if "alignment" in merged else merged


def copy(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of a spec whose padded page was computed for another block size."""
    new = {**inputs, "block_size": inputs["new_block_size"]}
    old = {**new, "page_size_padded": padded(inputs)}
    real = content(new, new["block_size"])
    return {
        "page_size_bytes": page_of(old),
        "real_page_size_bytes": real,
        "fresh_page_size_bytes": page_of(new),
    }


PAGES = {
    "attn": (2, 16, 256, 8192),
    "padded": (2, 16, 256, 10240),
    "nvfp4": (4, 16, 36, 2304),
    "mla656": (1, 64, 656, 41984),
    "mamba": (1, 1, 128, 512),
}
"""Heads, states, bytes of a cell and bytes of a page."""


@models("v033_kv_cache_layout_strides")
def strides(inputs: dict[str, Any]) -> dict[str, Any]:
    heads, count, cell, page = PAGES[inputs["spec"]]
    blocks, layers = inputs["num_blocks"], inputs["num_layers"]
    kernel = inputs["kernel_block_size"]
    if kernel is not None:
        blocks, page, count = blocks * count // kernel, page * kernel // count, kernel
    lens = {"L": layers, "B": blocks, "H": heads, "N": count, "C": cell}
    letters = inputs["layout"]
    outer = letters[: max(letters.index("L"), letters.index("B")) + 1]
    shape = [blocks, heads, count, cell]
    if page == heads * count * cell:
        memory = torch.empty([lens[letter] for letter in letters], device="meta")
        found = dict(zip(letters, memory.stride(), strict=True))
    elif "H" in outer and heads > 1:
        error = {"raises": "AssertionError", "message": ""}
        return {"shape": shape, "strides_LBHNC_bytes": error}
    else:
        # the padding is a longer last axis of what is inside of a page
        whole = torch.empty([*(lens[letter] for letter in outer), page], device="meta")
        found = dict(zip(outer, whole.stride(), strict=False))
        inner = letters[len(outer) :]
        part = torch.empty([lens[letter] for letter in inner], device="meta")
        found |= dict(zip(inner, part.stride(), strict=True))
    return {
        "shape": shape,
        "strides_LBHNC_bytes": [found[letter] for letter in "LBHNC"],
    }


@models("v033_mm_prefix_rswa_visible_keys")
@models("v033_unified_attention_masks")
def visible_keys(inputs: dict[str, Any]) -> dict[str, Any]:
    """Keys inside of the sequence alone: vLLM also counts keys past its end."""
    rows = []
    window, lookback = inputs["sliding_window"], inputs.get("chunk_lookback")
    recorded = inputs.get("mm_prefix_range")
    for req, length in enumerate(inputs["seq_lens"]):
        causal = inputs["causal"]
        causal = causal[req] if isinstance(causal, list) else causal
        ranges = [] if recorded is None else recorded[req].tolist()
        for position in range(length - inputs["query_lens"][req], length):
            row = []
            for key in range(length):
                is_near = window is None or abs(position - key) < window
                if inputs.get("rswa_window") is not None:
                    is_near = position - key < inputs["rswa_window"]
                    is_near |= key < int(inputs["rswa_prefix_lens"][req])
                if window is not None and lookback is not None:
                    size = window // (lookback + 1)
                    is_near = 0 <= position // size - key // size <= lookback
                is_visible = is_near and (key <= position or not causal)
                is_visible |= any(
                    first < last
                    and first <= min(key, position)
                    and max(key, position) <= last
                    and not (is_clamped(inputs) and position - key >= window)
                    for first, last in ranges
                )
                row += [key] if is_visible else []
            rows.append(row)
    return {"visible": rows}


def is_clamped(inputs: dict[str, Any]) -> bool:
    clamp = inputs.get("mm_prefix_clamp_sliding_window", False)
    return bool(clamp) and inputs["sliding_window"] is not None
