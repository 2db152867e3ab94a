"""What does one layer's KV cache look like?

A spec says what a block of a layer holds, and so how many bytes a page is. A config says how a
whole model's caches lie in memory: layers whose pages are alike make a group, which shares one
block table; layers of different groups may share one tensor.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from .checks import check_not_negative, check_positive


@dataclass(frozen=True)
class KVCacheSpec:
    """The page of one attention layer: what a block holds, and how many bytes that is.

    Args:
        block_size: slots (tokens) in a block, any number from 1.
        num_kv_heads: key/value heads of the layer.
        head_size: elements of one head's key, and of its value.
        dtype: element type of the cache; an FP8 dtype is one byte an element. Its scales lie
            with the layer and take no room in a page.

    Raises:
        ValueError: a number below 1.

    Example:
        16 slots of 8 heads of 128 bfloat16 elements, keys and values: 65,536 bytes a page; of
        float8_e4m3fn elements 32,768.
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
    """A layer that keeps the keys and values of its whole sequence.

    Args:
        sliding_window, attention_chunk_size: what the layer sees, where an engine keeps all blocks
            of a layer that needs only some, to have fewer groups; None: everything.
    """

    sliding_window: int | None = field(default=None, kw_only=True)
    attention_chunk_size: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class SlidingWindowSpec(KVCacheSpec):
    """A layer whose tokens see the last `sliding_window` keys, themselves included."""

    sliding_window: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(sliding_window=self.sliding_window)


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(KVCacheSpec):
    """A layer whose tokens see the keys of their own chunk of `attention_chunk_size`."""

    attention_chunk_size: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(attention_chunk_size=self.attention_chunk_size)


@dataclass(frozen=True)
class CrossAttentionSpec(KVCacheSpec):
    """A decoder's layer that keeps the keys and values of the encoder's tokens."""


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """A layer that keeps one latent vector a token, from which keys and values are made.

    `head_size` is the latent's length, its rotary part included.

    Example:
        16 slots of one latent of 576 bfloat16 elements: 18,432 bytes a page.
    """

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block: a latent stands for key and value, so it is counted once."""
        elements = self.block_size * self.num_kv_heads * self.head_size
        return elements * self.dtype.itemsize


@dataclass(frozen=True)
class KVCacheTensor:
    """One allocation, and the layers that see it.

    Args:
        size: bytes.
        shared_by: layers of different groups; each sees all of the bytes, and a block belongs to
            the group that it was handed out to.
    """

    size: int
    shared_by: tuple[str, ...]

    def __post_init__(self) -> None:
        check_not_negative(size=self.size)
        object.__setattr__(self, "shared_by", tuple(self.shared_by))


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers whose pages are alike: they share one block table.

    Args:
        layer_names: at least one.
        kv_cache_spec: the page of each of them.
    """

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_names", tuple(self.layer_names))


@dataclass(frozen=True)
class KVCacheConfig:
    """How the caches of all layers lie in memory.

    Args:
        num_blocks: blocks that can be handed out.
        kv_cache_tensors: what is allocated.
        kv_cache_groups: every layer once, as in the tensors.

    Raises:
        ValueError: a layer stands in two tensors or groups, or only in one of the two lists.
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
                    f"layer {min(names)!r} stands in {here} but not in {there}: expected"
                    " every layer in one tensor and one group"
                )


def _each_once(what: str, lists: Iterable[tuple[str, ...]]) -> set[str]:
    """Return the layers of some lists, none of them named twice."""
    counts = Counter(name for names in lists for name in names)
    for name, count in counts.items():
        if count > 1:
            raise ValueError(
                f"layer {name!r} stands {count} times in {what}: expected once, since a"
                " layer has one cache"
            )
    return set(counts)


@dataclass(frozen=True)
class CacheConfig:
    """What an engine says about the caches of all layers (vLLM's name).

    Args:
        block_size: slots in a block.
        cache_dtype: "auto": that of the model; else "fp8", "fp8_e4m3" or "fp8_e5m2".
        sliding_window: of every layer that has none of its own; None: everything is seen.
        calculate_kv_scales: measure the scales of a quantised cache in the first step.
        is_attention_free: no layer of the model attends.
    """

    block_size: int = 16
    cache_dtype: str = "auto"
    sliding_window: int | None = None
    calculate_kv_scales: bool = False
    is_attention_free: bool = False
