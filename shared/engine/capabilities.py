"""Capabilities that a backend declares, and the checks that read them.

A backend states a few facts as class attributes; the questions that an engine asks (vLLM 0.33's
`supports_...`) are answered from them, and from the arguments that its layers take.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..contract.kinds import AttentionType, cache_dtype_of
from ..contract.layouts import BLOCK, HEAD, SLOT, KVCacheLayout
from ..validation import check_positive


@dataclass(frozen=True)
class MultipleOf:
    """Every block size that is a multiple of `base`."""

    base: int

    def __post_init__(self) -> None:
        check_positive(base=self.base)


class Capabilities:
    """The answers of a backend to an engine's questions.

    Args:
        accept_output_buffer: its layers write into a tensor they are given.
        supported_dtypes: of the model, and so of a cache whose dtype is "auto".
        supported_kv_cache_dtypes: of a cache beside those: quantised ones.
        supported_kernel_block_sizes: blocks its kernels read; empty: any. A block of the engine
            may be cut into several of theirs.
        supported_kv_cache_layouts: most preferred first; None: any.
        supported_attn_types: the kinds of attention it runs.
    """

    accept_output_buffer: ClassVar[bool] = True
    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (
        torch.float16,
        torch.bfloat16,
    )
    supported_kv_cache_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    supported_kernel_block_sizes: ClassVar[tuple[int | MultipleOf, ...]] = ()
    supported_kv_cache_layouts: ClassVar[tuple[KVCacheLayout, ...] | None] = None
    supported_attn_types: ClassVar[tuple[str, ...]] = (AttentionType.DECODER,)

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Return the head sizes it takes; an empty list: any."""
        return []

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Return the class that runs a layer."""
        raise NotImplementedError

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        """Return the block sizes its kernels read; an empty list: any."""
        return list(cls.supported_kernel_block_sizes)

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Tell whether blocks of that size can be cut into blocks its kernels read.

        None, a size not yet chosen, is taken.
        """
        bases = _bases(cls.get_supported_kernel_block_sizes())
        if block_size is None or not bases:
            return True
        check_positive(block_size=block_size)
        return any(block_size % base == 0 for base in bases)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the default if it is taken, else the smallest size that its kernels read."""
        if cls.supports_block_size(default_block_size):
            return default_block_size
        return min(_bases(cls.get_supported_kernel_block_sizes()))

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Tell whether it takes heads of that size."""
        sizes = cls.get_supported_head_sizes()
        return not sizes or head_size in sizes

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """Tell whether it takes models of that dtype."""
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Tell whether it takes caches of that dtype: its name, "auto" or None (the model's).

        Quantised ones have the names of `cache_dtype_of`: "fp8", "fp8_e4m3", "fp8_e5m2".
        """
        if kv_cache_dtype is None or kv_cache_dtype == "auto":
            return True
        names = {str(dtype).removeprefix("torch.") for dtype in cls.supported_dtypes}
        if kv_cache_dtype in names:
            return True
        try:
            dtype = cache_dtype_of(kv_cache_dtype, cls.supported_dtypes[0])
        except ValueError:
            return False
        return dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Tell whether it runs attention of that kind."""
        return attn_type in cls.supported_attn_types

    @classmethod
    def supports_option(cls, name: str) -> bool:
        """Tell whether its layers take an option: an argument of their class of that name."""
        parameters = inspect.signature(cls.get_impl_cls().__init__).parameters
        return name in parameters or any(
            each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()
        )

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Tell whether its layers can see fewer than all keys."""
        return cls.supports_option("sliding_window")

    @classmethod
    def supports_sink(cls) -> bool:
        """Tell whether its layers take a score that no key owns."""
        return cls.supports_option("sinks")

    @classmethod
    def get_kv_cache_stride_order(cls, layout: KVCacheLayout) -> tuple[int, ...]:
        """Return how [2, num_blocks, block_size, heads, head_size] lie in memory.

        Keys and values stay the outermost axis, the elements of a head the innermost.

        Raises:
            ValueError: a layout in which a layer has no memory of its own.
        """
        if not layout.is_layer_compact:
            raise ValueError(
                f"layout = {layout.name}: expected one that begins with L, whose layers have"
                " tensors of their own; reshape_layered_kv_cache takes all"
            )
        axes = {BLOCK: 1, SLOT: 2, HEAD: 3}
        inner = [axes[each] for each in layout.stride_order if each in axes]
        return (0, *inner, 4)


def select_common_block_size(
    kv_manager_block_size: int, backends: Sequence[type[Capabilities]]
) -> int:
    """Return the size of the blocks that the kernels of all backends read.

    A block of the engine is cut into as few of them as possible: mostly into one.

    Args:
        kv_manager_block_size: slots in a block that the engine hands out, from 1.
        backends: those that share the engine's blocks.

    Raises:
        ValueError: no size divides the engine's that all of them read.

    Source:
        vLLM's function of that name.

    Example:
        Blocks of 128 for kernels that read 64 and kernels that read multiples of 16: 64.
    """
    check_positive(kv_manager_block_size=kv_manager_block_size)
    for size in range(kv_manager_block_size, 0, -1):
        divides = kv_manager_block_size % size == 0
        if divides and all(_reads(each, size) for each in backends):
            return size
    said = "; ".join(str(each.get_supported_kernel_block_sizes()) for each in backends)
    raise ValueError(
        f"kv_manager_block_size = {kv_manager_block_size}: expected a multiple of a size"
        f" that all backends read ({said})"
    )


def _reads(backend: type[Capabilities], block_size: int) -> bool:
    """Tell whether a backend's kernels read blocks of that size as they are."""
    sizes = backend.get_supported_kernel_block_sizes()
    return not sizes or any(
        block_size % size.base == 0
        if isinstance(size, MultipleOf)
        else block_size == size
        for size in sizes
    )


def _bases(sizes: Sequence[int | MultipleOf]) -> list[int]:
    return [size.base if isinstance(size, MultipleOf) else size for size in sizes]
