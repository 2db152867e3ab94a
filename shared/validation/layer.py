"""Validation of attention layers and of their scales."""

from collections.abc import Mapping
from numbers import Real
from typing import Any, NoReturn

from torch import Tensor

from ..contract.cache_formats import CacheFormat
from .attention_options import check_scale


def check_new_layer(name: str, layers: Mapping[str, Any]) -> None:
    """Reject a name that another layer has."""
    if name in layers:
        raise ValueError(
            f"prefix = {name!r} is the name of another layer: expected a name of its own"
        )


def check_kv_sharing_target(layer: Any, target: str, layers: Mapping[str, Any]) -> None:
    """Raise if the layer whose cache is shared is missing, or its cache is a different one."""
    if target == layer.layer_name:
        raise ValueError(
            f"layer {target!r} shares its cache with itself: expected an earlier layer"
        )
    if target not in layers:
        raise ValueError(
            f"layer {layer.layer_name!r} shares the cache of {target!r}: expected a layer that"
            f" comes before it, one of {', '.join(map(repr, layers)) or 'none'}"
        )
    other = layers[target]
    further = getattr(other, "kv_sharing_target_layer_name", None)
    if further is not None:
        raise ValueError(
            f"layer {layer.layer_name!r} shares the cache of {target!r}, which has none of its"
            f" own: expected {further!r}, whose cache that one shares"
        )
    for name in (
        "attn_type",
        "num_kv_heads",
        "head_size",
        "head_size_v",
        "kv_cache_dtype",
    ):
        one, its = getattr(layer, name), getattr(other, name)
        if one != its:
            raise ValueError(
                f"layer {layer.layer_name!r} has {name} = {one} and shares the cache of"
                f" {target!r}: expected {its}, as that one has"
            )


def check_latent_format(name: str, use_mla: bool, form: CacheFormat) -> None:
    """Raise if a layer of latent attention is to store scales that a write measures."""
    if use_mla and form.is_measured:
        raise ValueError(
            f"layer {name!r}: kv_cache_dtype = {form.name!r} and use_mla: expected auto or an FP8"
            " dtype, since latents have formats of their own"
        )


def reject_option(layer: str, backend: str, name: str, value: object) -> NoReturn:
    """Reject an option that the backend's layers do not support."""
    raise NotImplementedError(
        f"layer {layer!r}: {name} = {value!r} is more than the layers of {backend} take:"
        f" expected a backend whose layers have an argument {name}"
    )


def check_scale_inputs(**tensors: Tensor | None) -> None:
    """Raise if a tensor is missing or empty."""
    for name, tensor in tensors.items():
        if tensor is None or not tensor.numel():
            shape = None if tensor is None else list(tensor.shape)
            raise ValueError(
                f"{name} has shape {shape}: expected at least one element to measure"
            )


def check_scale_types(**scales: object) -> None:
    """Raise TypeError if a scale is neither a number nor a tensor."""
    for name, scale in scales.items():
        is_number = isinstance(scale, Real) and not isinstance(scale, bool)
        if not (scale is None or is_number or isinstance(scale, Tensor)):
            raise TypeError(
                f"{name} = {scale!r}: expected a number or a tensor, or None"
            )


def check_new_scale(name: str, scale: Tensor, num_kv_heads: int | None) -> None:
    """Reject a scale that is not one number, or one per kv head; None allows one number alone."""
    check_scale(name, scale, {}, num_kv_heads, contents=True)
