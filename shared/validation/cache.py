"""Validation of cache writes, gathers and block copies."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..contract.attention_options import AttentionOptions
from ..contract.cache_formats import CODE_DTYPES, find_format, head_size_of
from .attention_options import check_cache_scales
from .batch import check_block_ids, check_block_table, check_start_loc
from .memory import check_own_memory, check_results_apart, is_same_view
from .primitives import (
    FLOATS,
    check_dtype,
    check_not_negative,
    check_positive,
    check_same_device,
)


def check_caches(key_cache: Tensor, value_cache: Tensor) -> None:
    """Raise an error if key cache and value cache differ in more than the head size."""
    check_dtype("key_cache", key_cache, *FLOATS, *CODE_DTYPES)
    check_dtype("value_cache", value_cache, key_cache.dtype)
    shapes = key_cache.shape, value_cache.shape
    if {len(shape) for shape in shapes} != {4} or shapes[0][:3] != shapes[1][:3]:
        raise ValueError(
            f"key_cache has shape {list(shapes[0])} and value_cache {list(shapes[1])}:"
            " expected [num_blocks, block_size, kv_heads, head_size], alike but for the"
            " head size"
        )
    check_positive(head_size=shapes[0][3], value_head_size=shapes[1][3])
    check_same_device(key_cache=key_cache, value_cache=value_cache)


def check_reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | float | None,
    v_scale: Tensor | float | None,
    kv_cache_dtype: str | None,
    k_global_scale: float | None,
    v_global_scale: float | None,
    contents: bool,
) -> None:
    """Raise an error for a write that does not fit the cache, before anything is written."""
    check_caches(key_cache, value_cache)
    num_blocks, block_size, kv_heads, _ = key_cache.shape
    for name, tensor, cache in (
        ("key", key, key_cache),
        ("value", value, value_cache),
    ):
        _check_new_dtype(name, tensor, cache)
        head_size = head_size_of(cache)
        if tensor.dim() != 3 or tuple(tensor.shape[1:]) != (kv_heads, head_size):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: expected [tokens, {kv_heads},"
                f" {head_size}], as the cache has"
            )
    check_same_device(
        key_cache=key_cache, key=key, value=value, slot_mapping=slot_mapping
    )
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    tokens = min(key.shape[0], value.shape[0])
    if slot_mapping.dim() != 1 or slot_mapping.shape[0] > tokens:
        raise ValueError(
            f"slot_mapping has shape {list(slot_mapping.shape)}: expected at most"
            f" [{tokens}], the tokens of key and value"
        )
    scales = AttentionOptions(
        k_scale=k_scale,
        v_scale=v_scale,
        k_global_scale=k_global_scale,
        v_global_scale=v_global_scale,
    )
    check_cache_scales(scales, key_cache, value_cache, contents)
    written: dict[str, Tensor | None] = {
        "key_cache": key_cache,
        "value_cache": value_cache,
    }
    if find_format(key_cache.dtype, k_scale, kv_cache_dtype).is_measured:
        assert isinstance(k_scale, Tensor) and isinstance(v_scale, Tensor)
        written |= {"k_scale": k_scale, "v_scale": v_scale}
    check_own_memory(**written)
    if not contents:
        return
    num_slots = num_blocks * block_size
    owner: dict[int, int] = {}
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        if slot >= num_slots:
            raise IndexError(
                f"slot_mapping[{token}] = {slot} is outside the cache: expected -1 (do not"
                f" store) or 0 <= slot < {num_slots}"
            )
        if slot in owner:
            raise ValueError(
                f"slot_mapping[{token}] = {slot} is also slot_mapping[{owner[slot]}]:"
                " expected one token per slot, since the order of two writes is not defined"
            )
        owner[slot] = token


def _check_new_dtype(name: str, tensor: Tensor, cache: Tensor) -> None:
    if not find_format(cache.dtype).is_quantised:
        check_dtype(name, tensor, cache.dtype)
    elif tensor.dtype in CODE_DTYPES:
        raise TypeError(
            f"{name} is {tensor.dtype}: expected {' or '.join(map(str, FLOATS))}, which the"
            " write divides by the scale and rounds; numbers that are codes already would be"
            " divided twice"
        )
    else:
        check_dtype(name, tensor, *FLOATS)


def check_gather_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_start_loc: Tensor,
    num_tokens: int,
    k_scale: Tensor | float | None,
    v_scale: Tensor | float | None,
    dtype: torch.dtype | None,
    k_global_scale: float | None,
    v_global_scale: float | None,
    contents: bool,
) -> None:
    """Raise an error for a gather that would read outside the cache."""
    check_caches(key_cache, value_cache)
    check_not_negative(num_tokens=num_tokens)
    check_block_table(block_table)
    check_same_device(
        key_cache=key_cache, block_table=block_table, seq_start_loc=seq_start_loc
    )
    check_start_loc(
        "seq_start_loc", seq_start_loc, block_table.shape[0], num_tokens, contents
    )
    scales = AttentionOptions(
        k_scale=k_scale,
        v_scale=v_scale,
        k_global_scale=k_global_scale,
        v_global_scale=v_global_scale,
    )
    if dtype is not None or not find_format(key_cache.dtype).is_quantised:
        check_cache_scales(scales, key_cache, value_cache, contents)
    _check_result_dtype(key_cache, scales, dtype)
    if contents:
        num_blocks, block_size = key_cache.shape[:2]
        check_block_ids(block_table, seq_start_loc.diff(), block_size, num_blocks)


def _check_result_dtype(
    key_cache: Tensor, scales: AttentionOptions, dtype: torch.dtype | None
) -> None:
    if dtype is None:
        for name in scales.given:
            raise ValueError(
                f"{name} is given but dtype = None: expected the dtype of the result;"
                " without one a quantized cache's bytes come as they are"
            )
    elif not find_format(key_cache.dtype).is_quantised:
        raise ValueError(
            f"dtype = {dtype} but the cache is {key_cache.dtype}: expected None, as only"
            " codes are turned into numbers"
        )
    elif dtype not in FLOATS:
        names = " or ".join(map(str, FLOATS))
        raise TypeError(f"dtype = {dtype}: expected {names}")


def check_block_mapping(
    block_mapping: Tensor, num_source: int, num_destination: int, same_cache: bool
) -> None:
    """Raise an error for copies outside the cache, or with an order-dependent result."""
    check_dtype("block_mapping", block_mapping, torch.int64)
    if block_mapping.dim() != 2 or block_mapping.shape[1] != 2:
        raise ValueError(
            f"block_mapping has shape {list(block_mapping.shape)}: expected [pairs, 2],"
            " source and destination"
        )
    if block_mapping.device.type != "cpu":
        raise ValueError(
            f"block_mapping is on {block_mapping.device}: expected cpu, where the block"
            " manager made it"
        )
    sources = {source for source, _ in block_mapping.tolist()}
    taken: set[int] = set()
    for pair, (source, destination) in enumerate(block_mapping.tolist()):
        if not 0 <= source < num_source:
            raise IndexError(
                f"block_mapping[{pair}] copies from block {source}: expected 0 <= block id"
                f" < {num_source}"
            )
        if not 0 <= destination < num_destination:
            raise IndexError(
                f"block_mapping[{pair}] copies to block {destination}: expected"
                f" 0 <= block id < {num_destination}"
            )
        if destination in taken:
            raise ValueError(
                f"block_mapping[{pair}] copies to block {destination}, as an earlier pair"
                " does: expected every destination once"
            )
        if same_cache and destination in sources:
            raise ValueError(
                f"block_mapping[{pair}] copies to block {destination}, which another pair"
                " copies from: expected no block on both sides; make two calls"
            )
        taken.add(destination)


def check_copy_blocks(kv_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    """Raise an error for copies within caches that differ, or that the mapping does not fit."""
    check_kv_caches_alike(kv_caches)
    for layer, cache in enumerate(kv_caches):
        check_own_memory(**{f"cache {layer}": cache})
        num_blocks = cache.shape[1]
        check_block_mapping(block_mapping, num_blocks, num_blocks, same_cache=True)


def check_swap_blocks(
    source: Tensor, destination: Tensor, block_mapping: Tensor
) -> None:
    """Raise an error for copies between caches that differ, or that the mapping does not fit."""
    check_kv_caches_alike([source, destination])
    is_same = is_same_view(source, destination)
    check_results_apart(
        {"destination": destination}, {} if is_same else {"source": source}
    )
    check_block_mapping(
        block_mapping, source.shape[1], destination.shape[1], same_cache=is_same
    )


def check_kv_caches_alike(caches: Sequence[Tensor]) -> None:
    """Raise an error for layers whose caches differ in shape or dtype."""
    for layer, cache in enumerate(caches):
        if cache.dim() != 5 or cache.shape[0] != 2:
            raise ValueError(
                f"cache {layer} has shape {list(cache.shape)}: expected"
                " [2, num_blocks, block_size, kv_heads, head_size]"
            )
        if cache.dtype != caches[0].dtype or cache.shape[2:] != caches[0].shape[2:]:
            raise ValueError(
                f"cache {layer} is {list(cache.shape)} {cache.dtype} and cache 0"
                f" {list(caches[0].shape)} {caches[0].dtype}: expected blocks alike"
            )
