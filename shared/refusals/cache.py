"""Which writes, gathers and copies are refused?"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .batch import check_block_ids, check_block_table, check_start_loc
from .primitives import FLOATS, check_dtype, check_not_negative, check_same_device


def check_caches(key_cache: Tensor, value_cache: Tensor) -> None:
    """Refuse a key cache and a value cache that do not belong together."""
    check_dtype("key_cache", key_cache, *FLOATS)
    check_dtype("value_cache", value_cache, key_cache.dtype)
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape:
        raise ValueError(
            f"key_cache has shape {list(key_cache.shape)} and value_cache"
            f" {list(value_cache.shape)}: expected the same"
            " [num_blocks, block_size, kv_heads, head_size]"
        )
    check_same_device(key_cache=key_cache, value_cache=value_cache)


def check_reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    contents: bool,
) -> None:
    """Refuse a write that does not fit the cache, before any of it is done."""
    check_caches(key_cache, value_cache)
    num_blocks, block_size, kv_heads, head_size = key_cache.shape
    for name, tensor in (("key", key), ("value", value)):
        check_dtype(name, tensor, key_cache.dtype)
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
                " expected one token a slot, since the order of two writes is not defined"
            )
        owner[slot] = token


def check_gather_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_start_loc: Tensor,
    num_tokens: int,
    contents: bool,
) -> None:
    """Refuse a gather that would read outside the cache."""
    check_caches(key_cache, value_cache)
    check_not_negative(num_tokens=num_tokens)
    check_block_table(block_table)
    check_same_device(
        key_cache=key_cache, block_table=block_table, seq_start_loc=seq_start_loc
    )
    check_start_loc(
        "seq_start_loc", seq_start_loc, block_table.shape[0], num_tokens, contents
    )
    if contents:
        num_blocks, block_size = key_cache.shape[:2]
        check_block_ids(block_table, seq_start_loc.diff(), block_size, num_blocks)


def check_block_mapping(
    block_mapping: Tensor, num_source: int, num_destination: int, same_cache: bool
) -> None:
    """Refuse pairs of blocks whose copies would leave the cache or depend on their order."""
    check_dtype("block_mapping", block_mapping, torch.int64)
    if block_mapping.dim() != 2 or block_mapping.shape[1] != 2:
        raise ValueError(
            f"block_mapping has shape {list(block_mapping.shape)}: expected [pairs, 2],"
            " source and destination"
        )
    if block_mapping.device.type != "cpu":
        raise ValueError(
            f"block_mapping lies on {block_mapping.device}: expected cpu, where the block"
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


def check_kv_caches_alike(caches: Sequence[Tensor]) -> None:
    """Refuse layers whose caches differ in shape or element type."""
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
