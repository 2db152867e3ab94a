"""Validation of a backend's layers and of their steps."""

from typing import Any

import torch
from torch import Tensor

from ..contract.cache_formats import (
    TENSOR_SCALE_DTYPES,
    CacheFormat,
    cache_dtype_of,
)
from ..contract.kinds import AttentionType
from ..contract.layer_pages import layer_format, state_bytes, why_no_page
from .primitives import check_positive
from .score_numbers import LARGEST_SLOPE, check_soft_cap

UNCACHED = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
"""Kinds whose tokens attend to each other within one step, so nothing is cached."""


def check_impl(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    head_size_v: int,
    alibi_slopes: list[float] | None,
    sliding_window: int | None,
    kv_cache_dtype: str,
    logits_soft_cap: float | None,
    attn_type: str,
    kv_sharing_target_layer_name: str | None,
    sinks: Tensor | None,
    attention_chunk_size: int | None,
    position_bias: Tensor | None,
) -> None:
    """Raise if an argument of a layer is invalid or contradicts another one."""
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads = {num_heads} is not a multiple of num_kv_heads = {num_kv_heads}"
        )
    if sliding_window is not None:
        check_positive(sliding_window=sliding_window)
    if attention_chunk_size is not None:
        check_positive(attention_chunk_size=attention_chunk_size)
    # layers take 0 for no cap, as in vLLM
    if logits_soft_cap:
        check_soft_cap(logits_soft_cap)
    _check_per_head(num_heads, alibi_slopes, sinks, position_bias)
    form = layer_format(kv_cache_dtype)
    counting: dict[str, object] = {
        "sliding_window": sliding_window,
        "alibi_slopes": alibi_slopes,
        "attention_chunk_size": attention_chunk_size,
        "position_bias": position_bias,
    }
    _check_kind(attn_type, counting)
    check_positive(head_size=head_size, head_size_v=head_size_v)
    if attn_type in UNCACHED:
        if kv_sharing_target_layer_name is not None:
            raise ValueError(
                "kv_sharing_target_layer_name ="
                f" {kv_sharing_target_layer_name!r} and attn_type = '{attn_type}': expected"
                " None, since such a layer keeps no cache that could be shared"
            )
    elif head_size_v > head_size:
        raise ValueError(
            f"head_size_v = {head_size_v}: expected at most head_size = {head_size}, the"
            " elements of a slot of the cache"
        )
    elif form.is_measured:
        _check_stored(form, head_size, head_size_v)


def _check_stored(form: CacheFormat, head_size: int, head_size_v: int) -> None:
    """Raise an error for heads whose codes and scales do not fit a slot."""
    if reason := why_no_page(form, head_size):
        raise ValueError(reason)
    step = form.head_size_step
    if head_size_v % step:
        what = "channels of a scale" if form.channels_per_scale else "codes in a byte"
        raise ValueError(
            f"head_size_v = {head_size_v} with kv_cache_dtype = {form.name!r}: expected a multiple"
            f" of {step}, the {what}"
        )


def _check_per_head(
    num_heads: int,
    alibi_slopes: list[float] | None,
    sinks: Tensor | None,
    position_bias: Tensor | None,
) -> None:
    """Raise an error for options that do not have one entry per query head."""
    for name, given in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if given is not None and len(given) != num_heads:
            raise ValueError(
                f"{name} has {len(given)} entries: expected {num_heads}, one a query head"
            )
    for head, slope in enumerate(() if alibi_slopes is None else alibi_slopes):
        if not abs(slope) <= LARGEST_SLOPE:
            raise ValueError(
                f"alibi_slopes[{head}] = {slope}: expected a number of size up to"
                f" {LARGEST_SLOPE:.0e}"
            )
    if position_bias is not None and (
        position_bias.dim() != 2
        or position_bias.shape[0] != num_heads
        or position_bias.shape[1] % 2 == 0
    ):
        raise ValueError(
            f"position_bias has shape {list(position_bias.shape)}: expected [{num_heads},"
            " 2 * reach + 1], an entry for each distance from -reach to reach"
        )


def _check_kind(attn_type: str, counting: dict[str, object]) -> None:
    """Raise an error for an unknown kind of attention, and for options that it excludes.

    Args:
        attn_type: kind of attention.
        counting: options that depend on the distance between a query and a key, by name.
    """
    kinds = [kind.value for kind in AttentionType]
    if attn_type not in kinds:
        raise ValueError(
            f"attn_type = {attn_type!r}: expected one of {', '.join(kinds)}"
        )
    if attn_type == AttentionType.ENCODER_DECODER:
        for name, number in counting.items():
            if number is not None:
                raise ValueError(
                    f"{name} is given and attn_type = '{attn_type}': expected None, since"
                    " queries and keys count positions in different sequences"
                )


def check_impl_forward(
    output: Tensor | None,
    output_scale: Tensor | None,
    output_block_scale: Tensor | None,
) -> Tensor:
    """Return the output of a layer; raise if it is missing or does not fit its scale."""
    if output_block_scale is not None:
        raise NotImplementedError(
            "output_block_scale is given: expected None; one scale for the whole output is"
            " output_scale, and blocks are quantised after the call"
        )
    if output is None:
        raise ValueError("output = None: expected a tensor of the shape of query")
    is_quantised = output.dtype in TENSOR_SCALE_DTYPES
    if is_quantised and output_scale is None:
        raise ValueError(
            f"output_scale = None: expected a scale, as output is {output.dtype}"
        )
    if output_scale is not None and not is_quantised:
        raise ValueError(
            f"output_scale is given but output is {output.dtype}: expected a tensor of"
            f" {' or '.join(map(str, TENSOR_SCALE_DTYPES))}"
        )
    return output


def check_new_keys(
    key: Tensor | None, value: Tensor | None, slots: Tensor | None, crosses: bool
) -> None:
    """Reject keys without slots, and slots without keys.

    Args:
        key, value: Optional. Keys and values of the call.
        slots: Optional. Slots of the step's keys and values.
        crosses: whether they are an encoder's, which are written in one step only.
    """
    if (key is None) != (value is None):
        raise ValueError(
            f"{'key' if key is None else 'value'} = None: expected both, or neither"
        )
    if key is not None:
        if slots is None:
            raise ValueError(
                "cross_slot_mapping = None but the encoder's keys are given: expected the slot"
                " of each; keys that are already in the cache are left out (key = None)"
            )
        return
    if not crosses or (slots is not None and slots.numel()):
        what = "cross_slot_mapping" if crosses else "slot_mapping"
        count = 0 if slots is None else slots.shape[0]
        raise ValueError(
            f"key = None but {what} has {count} slots: expected the keys that go there"
        )


def check_own_keys(attn_type: str, **tensors: Tensor | None) -> None:
    """Reject an encoder's step without keys or values, since it has no cache."""
    for name, tensor in tensors.items():
        if tensor is None:
            raise ValueError(
                f"{name} = None and attn_type = '{attn_type}': expected a tensor, as no cache"
                " holds what the step does not bring"
            )


def check_cache_dtype(
    kv_cache: Tensor, kv_cache_dtype: str, model_dtype: torch.dtype
) -> None:
    """Reject a cache whose dtype is not the layer's."""
    expected = cache_dtype_of(kv_cache_dtype, model_dtype)
    if kv_cache.dtype != expected:
        raise TypeError(
            f"kv_cache is {kv_cache.dtype} and kv_cache_dtype = {kv_cache_dtype!r}: expected"
            f" {expected}"
        )


def check_stored_heads(key_cache: Tensor, head_size: int, form: CacheFormat) -> None:
    """Reject a cache whose slots do not hold the codes and the scales of a head."""
    expected = state_bytes(form, head_size, head_size) // 2
    if key_cache.shape[-1] != expected:
        raise ValueError(
            f"kv_cache has {key_cache.shape[-1]} elements per head and kv_cache_dtype ="
            f" {form.name!r}: expected {expected}, the bytes of {head_size} codes and their"
            " scales; a spec has them as stored_head_size"
        )


def check_layer_scale(layer: object, name: str) -> Any:
    """Return a scale of a layer; raise if it has none."""
    scale = getattr(layer, name, None)
    if scale is None:
        raise ValueError(
            f"layer has no {name}: expected a layer with scales, as its cache is quantised"
        )
    return scale


def read_global_scales(layer: object, form: CacheFormat) -> dict[str, float]:
    """Return what multiplies the block scales of a layer's cache, by the name of the option.

    Nothing is read from a device: vLLM's layers have their scales on the host too.

    Returns:
        `k_global_scale` and `v_global_scale`; empty if the format has none.

    Raises:
        ValueError: the layer has no such number, or one per head.
    """
    if not form.has_global_scale:
        return {}
    found: dict[str, float] = {}
    for side in "kv":
        number = getattr(layer, f"_{side}_scale_float", None)
        if number is None:
            raise ValueError(
                f"layer has no number _{side}_scale_float: expected one for all heads, as"
                f" kv_cache_dtype = {form.name!r} multiplies block scales by it; 1.0 takes them as"
                " they are"
            )
        found[f"{side}_global_scale"] = number
    return found


def check_encoder_fields(metadata: Any) -> None:
    """Reject a step without the start locations of the encoders' tokens."""
    for name in ("encoder_query_start_loc", "encoder_query_start_loc_cpu"):
        if getattr(metadata, name) is None:
            raise ValueError(
                f"{name} = None: expected where the tokens of each request's encoder start,"
                " as attn_type = 'encoder'"
            )


def check_whole_prompts(metadata: Any) -> None:
    """Reject chunked prompts, and tree masks, of a model without a decoder."""
    query_lens, seq_lens = metadata.query_start_loc_cpu.diff(), metadata.seq_lens_cpu
    # a request without new tokens is padding, whatever its length
    chunks = ((query_lens != seq_lens) & (query_lens > 0)).nonzero()
    if chunks.numel():
        req = int(chunks[0])
        raise ValueError(
            f"request {req} brings {int(query_lens[req])} of {int(seq_lens[req])} tokens and"
            " attn_type = 'encoder_only': expected the whole prompt in one step, since its"
            " tokens see each other both ways and no cache holds the others"
        )
    if metadata.tree_mask is not None:
        raise ValueError(
            "tree_mask is given and attn_type = 'encoder_only': expected None, since drafts"
            " are a decoder's"
        )
