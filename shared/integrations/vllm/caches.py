"""vLLM's caches: key and value views of one layer's cache, and the shape hooks up to 0.28."""

from typing import Any

import torch
from torch import Tensor

FP8_NAMES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""vLLM's names of the FP8 dtypes. vLLM allocates such a cache as uint8."""


def split_layer_cache(
    kv_cache: Tensor, head_size: int, kv_cache_dtype: str
) -> tuple[Tensor, Tensor]:
    """Return the key and value views of one layer's cache, which share its memory.

    Args:
        kv_cache: [num_blocks, 2, block_size, kv_heads, head_size], as in vLLM 0.25; or
            [num_blocks, kv_heads, block_size, elements], where a state has its key first and its
            value after it, as in 0.26 and later. Any strides.
        head_size: elements of a key.
        kv_cache_dtype: vLLM's name of the cache's dtype.

    Returns:
        Views [num_blocks, block_size, kv_heads, head_size] and [..., head_size_v].

    Raises:
        ValueError: the cache has neither of the two shapes.

    Example:
        [100, 8, 16, 256] with head_size 128: two views [100, 16, 8, 128]; the values of a state
        start 128 elements after its keys.
    """
    if kv_cache.dim() == 5 and kv_cache.shape[1] == 2:
        key, value = kv_cache.unbind(1)
    elif kv_cache.dim() == 4 and kv_cache.shape[3] > head_size:
        states = kv_cache.transpose(1, 2)
        key, value = states[..., :head_size], states[..., head_size:]
    else:
        raise ValueError(
            f"kv_cache has shape {list(kv_cache.shape)}: expected [num_blocks, 2, block_size,"
            f" kv_heads, {head_size}] or [num_blocks, kv_heads, block_size, elements] with more"
            f" than {head_size} elements"
        )
    fp8 = FP8_NAMES.get(kv_cache_dtype)
    if fp8 is not None and kv_cache.dtype != fp8:
        key, value = key.view(fp8), value.view(fp8)
    return key, value


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
        """Return the shape of a layer's cache."""
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
        """Return the shape of a layer's cache."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

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
