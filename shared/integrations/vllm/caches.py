"""vLLM's caches: the shape hooks up to 0.28, and new keys.

Ranks that share keys store a part of a prompt's new keys each. So that its new tokens can attend to
each other on every rank, all of them are also written into blocks that a rank does not share, in
the dtype of its cache.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...contract.cache_formats import (
    CACHE_DTYPE_NAMES,
    FORMATS,
    PLAIN,
    CacheFormat,
    named_format,
)
from ...contract.cache_formats import split_layer_cache as split_layer_cache
from ...contract.layer_pages import head_slots, measured_format, state_bytes

FP8_NAMES = CACHE_DTYPE_NAMES
"""vLLM's names of the FP8 dtypes."""

MODEL_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""vLLM's names of caches that are not quantised, besides "auto"."""

SCALED_NAMES = tuple(name for name, form in FORMATS.items() if form.is_measured)
"""Names of the formats whose scales are measured: vLLM's, and those that the plugin adds."""

NEW_BLOCK_SIZE = 16
"""Slots of a block of new keys."""


def format_of(name: str) -> CacheFormat:
    """Return the format of a cache by vLLM's name.

    Raises:
        ValueError: No format has this name.
    """
    return PLAIN if name in MODEL_DTYPES else named_format(name)


def with_scales(spec: Any) -> Any:
    """Return vLLM's description of a cache, with the bytes of scales that are stored in it.

    Args:
        spec: an `AttentionSpec` of vLLM 0.28 or later. It is returned as it is if its scales are
            not stored, or its bytes are given already.

    Raises:
        ValueError: a page cannot hold its heads.
    """
    name = getattr(spec.kv_quant_mode, "name", "").lower()
    form = measured_format(name)
    if form is None or spec.state_content_bytes is not None:
        return spec
    heads = spec.num_kv_heads
    slots, content = head_slots(form, heads, spec.head_size, spec.head_size_v)
    own = {} if slots == heads else {"num_head_slots": slots}
    return replace(spec, state_content_bytes=content, **own)


class HalvesShape:
    """The shape hooks of vLLM 0.25: keys and values are the halves of a block."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache; a key has its scales after it."""
        form = measured_format(cache_dtype_str)
        if form is not None:
            head_size = state_bytes(form, head_size, head_size) // 2
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(
        include_num_layers_dimension: bool = False,
    ) -> tuple[int, ...]:
        """Return the axes in memory order, with an axis of layers first if it is included."""
        if _heads_come_first():
            with_layers, order = (1, 4, 0, 2, 3, 5), (0, 1, 3, 2, 4)
        else:
            with_layers, order = (1, 0, 2, 3, 4, 5), (0, 1, 2, 3, 4)
        return with_layers if include_num_layers_dimension else order


class PackedShape:
    """The shape hooks of vLLM 0.26 to 0.28: a state has its key first and its value after it."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache; keys and values have their scales after them."""
        form = measured_format(cache_dtype_str)
        slots, content = num_kv_heads, 2 * head_size
        if form is not None:
            slots, content = head_slots(form, num_kv_heads, head_size, head_size)
        return (num_blocks, slots, block_size, content)

    @staticmethod
    def get_kv_cache_stride_order(
        include_num_layers_dimension: bool = False,
    ) -> tuple[int, ...]:
        """Return the axes in memory order, with an axis of layers first if it is included."""
        if _heads_come_first():
            with_layers, order = (1, 2, 0, 3, 4), (0, 1, 2, 3)
        else:
            with_layers, order = (1, 0, 3, 2, 4), (0, 2, 1, 3)
        return with_layers if include_num_layers_dimension else order


class NoShape:
    """No shape hooks, from vLLM 0.29 on: vLLM gives the shape and chooses the memory order."""


def choose_shape(interface: Any) -> type[Any]:
    """Return the class with the shape hooks of an interface (`VllmInterface`)."""
    if not interface.has_shape_hooks:
        return NoShape
    return PackedShape if interface.is_packed else HalvesShape


def _heads_come_first() -> bool:
    """Return whether vLLM's layout is HND: the heads are outside of the slots of a block."""
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    return bool(get_kv_cache_layout() == "HND")


@dataclass(frozen=True)
class NewBlocks:
    """Where a step's new keys are in these blocks, for all layers. A request has blocks of its own.

    Args:
        slot_mapping: [tokens] int64 slot of each new token; -1 for padding.
        block_table: [reqs, max_blocks] int32. Entries past the end of a request are not read.
        lens: [reqs] int32 new keys of each request.

    Example:
        Two requests of 20 and 3 new tokens have the blocks 0 and 1, and 2.
    """

    slot_mapping: Tensor
    block_table: Tensor
    lens: Tensor


def count_blocks(max_tokens: int, max_reqs: int) -> int:
    """Return the blocks that any step within these bounds fits in."""
    return max_tokens // NEW_BLOCK_SIZE + max_reqs


def find_new_blocks(metadata: Any) -> NewBlocks:
    """Return the blocks of a step. The host does not wait.

    Args:
        metadata: the `PagetwinMetadata` of the step.
    """
    starts, device = metadata.query_start_loc, metadata.query_start_loc.device
    reqs = len(starts) - 1
    # a block more than it fills is left to each request before, so blocks never overlap
    first = starts[:-1] // NEW_BLOCK_SIZE + torch.arange(reqs, device=device)
    width = -(-metadata.max_query_len // NEW_BLOCK_SIZE)
    table = first[:, None] + torch.arange(width, device=device)
    token = torch.arange(metadata.num_actual_tokens, dtype=starts.dtype, device=device)
    req = torch.searchsorted(starts[1:], token, right=True).clamp(max=reqs - 1)
    slots = first[req] * NEW_BLOCK_SIZE + token - starts[req]
    return NewBlocks(
        torch.where(token < starts[-1], slots, -1).long(),
        table.to(torch.int32),
        starts.diff(),
    )
