"""Validation of cache views and of the caches of a model."""

from collections.abc import Collection, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from ..contract.specs import KVCacheSpec
from .primitives import check_dtype, check_positive


def check_whole_pages(name: str, raw: Tensor, page_size_bytes: int) -> int:
    """Return the number of pages; raise an error if the bytes are not a whole number of them."""
    check_dtype(name, raw, torch.int8)
    if not raw.is_contiguous():
        raise ValueError(
            f"{name} has stride {raw.stride()}: expected contiguous bytes, as allocated"
        )
    num_pages, rest = divmod(raw.numel(), page_size_bytes)
    if rest:
        raise ValueError(
            f"{name} has {raw.numel()} bytes: expected a multiple of {page_size_bytes},"
            " the bytes of a page"
        )
    return num_pages


def check_plain_cells(spec: KVCacheSpec) -> None:
    """Raise an error for a cache whose slots are not keys and values of one size."""
    if not spec.has_plain_cells:
        fields = ", ".join(
            f"{name} = {getattr(spec, name)}"
            for name in (
                "head_size_v",
                "num_head_slots",
                "state_content_bytes",
                "tokens_per_state",
            )
        )
        raise ValueError(
            f"{fields}: expected a key and a value of head_size elements per slot and head;"
            " view the bytes with compute_layout_strides"
        )
    if spec.page_size_bytes % spec.dtype.itemsize:
        raise ValueError(
            f"page_size_bytes = {spec.page_size_bytes}: expected a multiple of"
            f" {spec.dtype.itemsize}, the bytes of an element"
        )


def check_no_padding(spec: KVCacheSpec) -> None:
    """Raise an error for padded pages where keys and values are the outermost axis."""
    if spec.page_size_bytes > spec.real_page_size_bytes:
        raise ValueError(
            f"page_size_bytes = {spec.page_size_bytes}: expected {spec.real_page_size_bytes},"
            " a page without padding; reshape_layered_kv_cache supports padding"
        )


def check_enough_pages(layer: str, num_pages: int, num_blocks: int) -> None:
    """Raise an error for a cache with fewer blocks than can be allocated."""
    if num_pages < num_blocks:
        raise ValueError(
            f"the tensor of layer {layer!r} holds {num_pages} pages: expected at least"
            f" num_blocks = {num_blocks}; make its size num_blocks pages"
        )


def check_view(
    raw: Tensor, dtype: torch.dtype, shape: Sequence[int], stride_order: Sequence[int]
) -> None:
    """Raise an error if the order is not a permutation or the shape does not cover all bytes."""
    check_dtype("raw", raw, torch.int8)
    if sorted(stride_order) != list(range(len(shape))):
        raise ValueError(
            f"stride_order = {tuple(stride_order)}: expected every axis from 0 to"
            f" {len(shape) - 1} once, the outermost in memory first"
        )
    if prod(shape) * dtype.itemsize != raw.numel():
        raise ValueError(
            f"shape {tuple(shape)} of {dtype} has {prod(shape) * dtype.itemsize} bytes:"
            f" expected {raw.numel()}, those of raw; does the backend's cache hold what"
            " its spec says?"
        )


def check_halves(kv_cache: Tensor) -> None:
    """Raise an error if a cache has not one half of keys and one of values."""
    if kv_cache.shape[0] != 2:
        raise ValueError(
            f"kv_cache has shape {list(kv_cache.shape)}: expected [2, num_blocks, block_size,"
            " kv_heads, head_size]"
        )


def check_packed(kv_cache: Tensor, num_kv_heads: int, head_size: int) -> None:
    """Raise an error if a head is not a multiple of 16 bytes, or a block not of whole tokens."""
    check_positive(num_kv_heads=num_kv_heads, head_size=head_size)
    part = 16 // kv_cache.element_size()
    if head_size % part:
        raise ValueError(
            f"head_size = {head_size}: expected a multiple of {part}, the elements of"
            " 16 bytes"
        )
    is_right = kv_cache.dim() == 3 and kv_cache.shape[0] == 2
    if not is_right or kv_cache.shape[2] % (num_kv_heads * head_size):
        raise ValueError(
            f"kv_cache has shape {list(kv_cache.shape)}: expected [2, num_blocks,"
            f" block_size * {num_kv_heads * head_size}]"
        )


def check_layers_present(
    what: str, layers: Collection[str], wanted: Collection[str]
) -> None:
    """Raise an error for a needed layer that is missing."""
    for name in wanted:
        if name not in layers:
            raise KeyError(
                f"layer {name!r} is missing in {what}: expected one of"
                f" {', '.join(map(repr, layers)) or 'none'}"
            )


def check_shared_caches(targets: Mapping[str, str], kv_caches: Collection[str]) -> None:
    """Raise an error for a layer that shares a missing cache."""
    for layer, target in targets.items():
        if target not in kv_caches:
            raise KeyError(
                f"layer {layer!r} shares the cache of {target!r}, which has none:"
                f" expected one of {', '.join(map(repr, kv_caches)) or 'none'}"
            )


def layer_number(name: str) -> int:
    """Return the number in a layer's name; raise an error if it has none or two."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise ValueError(
            f"layer {name!r} has {len(numbers)} numbers in its name: expected one between"
            ' dots, as in "model.layers.0.attn"'
        )
    return numbers[0]
