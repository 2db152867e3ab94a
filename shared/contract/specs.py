"""KV-cache specs: the page of a layer, and the tensors and groups of a model.

A spec describes the content of a layer's block and thereby the size of a page. A config describes
the memory of a whole model's caches. Layers with equal pages form a group with one block table.
Layers of different groups may share one tensor.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from .checks import check_not_negative, check_positive


@dataclass(frozen=True)
class KVCacheSpec:
    """The page of one attention layer: the content of a block and its size in bytes.

    Args:
        block_size: slots (tokens) in a block, at least 1.
        num_kv_heads: key/value heads of the layer.
        head_size: elements of one head's key, and of its value.
        dtype: dtype of the cache. An FP8 dtype has one byte per element. Its scales are stored
            with the layer, not in a page.

    Raises:
        ValueError: a number is below 1.

    Example:
        16 slots of 8 heads of 128 bfloat16 elements, keys and values: 65,536 bytes per page. With
        float8_e4m3fn elements: 32,768 bytes.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        check_positive(
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
        )

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block, its keys and its values together."""
        elements = 2 * self.block_size * self.num_kv_heads * self.head_size
        return elements * self.dtype.itemsize


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """A layer that stores the keys and values of its whole sequence.

    Args:
        sliding_window, attention_chunk_size: Optional. Visible range of the layer, if the engine
            stores all blocks of a layer that needs only some, to have fewer groups. If None, all
            keys are visible.
    """

    sliding_window: int | None = field(default=None, kw_only=True)
    attention_chunk_size: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class SlidingWindowSpec(KVCacheSpec):
    """A layer whose tokens attend to the last `sliding_window` keys, their own included."""

    sliding_window: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(sliding_window=self.sliding_window)


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(KVCacheSpec):
    """A layer whose tokens attend to the keys of their own chunk of `attention_chunk_size`."""

    attention_chunk_size: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(attention_chunk_size=self.attention_chunk_size)


@dataclass(frozen=True)
class CrossAttentionSpec(KVCacheSpec):
    """A decoder layer that stores the keys and values of the encoder's tokens."""


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """A layer that stores one latent vector per token, from which keys and values are computed.

    `head_size` is the latent's length, its rotary part included.

    Example:
        16 slots of one latent of 576 bfloat16 elements: 18,432 bytes per page.
    """

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block. A latent represents key and value, so it is counted once."""
        elements = self.block_size * self.num_kv_heads * self.head_size
        return elements * self.dtype.itemsize


@dataclass(frozen=True)
class KVCacheTensor:
    """One allocation, and the layers that share it.

    Args:
        size: size in bytes.
        shared_by: layers of different groups. Each has a view of all bytes, and a block belongs
            to the group to which it is allocated.
    """

    size: int
    shared_by: tuple[str, ...]

    def __post_init__(self) -> None:
        check_not_negative(size=self.size)
        object.__setattr__(self, "shared_by", tuple(self.shared_by))


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers with equal pages, which share one block table.

    Args:
        layer_names: names of at least one layer.
        kv_cache_spec: page of each of them.
    """

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_names", tuple(self.layer_names))


@dataclass(frozen=True)
class KVCacheConfig:
    """The tensors and groups of all layers' caches.

    Args:
        num_blocks: number of blocks that can be allocated.
        kv_cache_tensors: the allocations.
        kv_cache_groups: the groups. Every layer is in one tensor and one group.

    Raises:
        ValueError: a layer is in two tensors or groups, or missing in one of the lists.
    """

    num_blocks: int
    kv_cache_tensors: tuple[KVCacheTensor, ...]
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]

    def __post_init__(self) -> None:
        check_not_negative(num_blocks=self.num_blocks)
        object.__setattr__(self, "kv_cache_tensors", tuple(self.kv_cache_tensors))
        object.__setattr__(self, "kv_cache_groups", tuple(self.kv_cache_groups))
        in_tensors = _each_once(
            "kv_cache_tensors", (each.shared_by for each in self.kv_cache_tensors)
        )
        in_groups = _each_once(
            "kv_cache_groups", (each.layer_names for each in self.kv_cache_groups)
        )
        for here, there, names in (
            ("kv_cache_groups", "kv_cache_tensors", in_groups - in_tensors),
            ("kv_cache_tensors", "kv_cache_groups", in_tensors - in_groups),
        ):
            if names:
                raise ValueError(
                    f"layer {min(names)!r} is in {here} but not in {there}: expected"
                    " every layer in one tensor and one group"
                )


def _each_once(what: str, lists: Iterable[tuple[str, ...]]) -> set[str]:
    """Return the layers of some lists; raise if one is listed twice."""
    counts = Counter(name for names in lists for name in names)
    for name, count in counts.items():
        if count > 1:
            raise ValueError(
                f"layer {name!r} is {count} times in {what}: expected once, since a"
                " layer has one cache"
            )
    return set(counts)


@dataclass(frozen=True)
class CacheConfig:
    """The engine's settings for the caches of all layers (vLLM's name).

    Args:
        block_size: slots in a block.
        cache_dtype: "auto" for the model's dtype, "fp8", "fp8_e4m3" or "fp8_e5m2".
        sliding_window: Optional. Window of layers without one of their own. If None, all keys
            are visible.
        calculate_kv_scales: whether the first step measures the scales of a quantized cache.
        is_attention_free: whether the model has no attention layer.
    """

    block_size: int = 16
    cache_dtype: str = "auto"
    sliding_window: int | None = None
    calculate_kv_scales: bool = False
    is_attention_free: bool = False
