"""Capabilities that a backend declares, and the checks that read them.

A backend declares its capabilities as class attributes. The methods that an engine calls (vLLM
0.33's `supports_...`) read these attributes and the parameters of the backend's layer class.
"""

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ..contract.kinds import AttentionType
from ..contract.layer_pages import layer_format
from ..contract.layouts import BLOCK, HEAD, SLOT, KVCacheLayout
from ..contract.specs import MultipleOf as MultipleOf
from ..validation import check_positive


class Capabilities:
    """The capabilities of a backend.

    Args:
        accept_output_buffer: whether its layers write into an output tensor of the caller.
        supported_dtypes: dtypes of the model, and so of a cache whose dtype is "auto".
        supported_kv_cache_dtypes: further dtypes of a cache, which one number for all multiplies.
        stores_scales: whether its layers take caches that store the scales that a write measures.
        supported_kernel_block_sizes: block sizes of its kernels. If empty, any. A block of the
            engine may consist of several kernel blocks.
        supported_kv_cache_layouts: Optional. Layouts, the most preferred first. If None, any.
        supported_attn_types: kinds of attention that it runs.
    """

    accept_output_buffer: ClassVar[bool] = True
    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (
        torch.float16,
        torch.bfloat16,
    )
    supported_kv_cache_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    stores_scales: ClassVar[bool] = False
    supported_kernel_block_sizes: ClassVar[tuple[int | MultipleOf, ...]] = ()
    supported_kv_cache_layouts: ClassVar[tuple[KVCacheLayout, ...] | None] = None
    supported_attn_types: ClassVar[tuple[str, ...]] = (AttentionType.DECODER,)

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Return the supported head sizes. An empty list means any."""
        return []

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Return the class that runs a layer."""
        raise NotImplementedError

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        """Return the block sizes of its kernels. An empty list means any."""
        return list(cls.supported_kernel_block_sizes)

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Return whether blocks of that size can be divided into blocks of its kernels.

        True for None, which means that the size is not chosen yet.
        """
        bases = _bases(cls.get_supported_kernel_block_sizes())
        if block_size is None or not bases:
            return True
        check_positive(block_size=block_size)
        return any(block_size % base == 0 for base in bases)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the default if it is supported, else the smallest block size of its kernels."""
        if cls.supports_block_size(default_block_size):
            return default_block_size
        return min(_bases(cls.get_supported_kernel_block_sizes()))

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return whether it supports heads of that size."""
        sizes = cls.get_supported_head_sizes()
        return not sizes or head_size in sizes

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """Return whether it supports models of that dtype."""
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Return whether it supports caches of that dtype: a name, "auto" or None (the model's).

        Quantised ones have the names of their formats: "fp8" or "fp8_e4m3", "fp8_e5m2", and those
        whose scales are measured.
        """
        if kv_cache_dtype is None or kv_cache_dtype == "auto":
            return True
        names = {str(dtype).removeprefix("torch.") for dtype in cls.supported_dtypes}
        if kv_cache_dtype in names:
            return True
        try:
            form = layer_format(kv_cache_dtype)
        except ValueError:
            return False
        if form.is_measured:
            return cls.stores_scales
        return form.dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Return whether it runs attention of that kind."""
        return attn_type in cls.supported_attn_types

    @classmethod
    def supports_option(cls, name: str) -> bool:
        """Return whether the layer class has a parameter of that name."""
        parameters = inspect.signature(cls.get_impl_cls().__init__).parameters
        return name in parameters or any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD
            for parameter in parameters.values()
        )

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return whether its layers support a sliding window."""
        return cls.supports_option("sliding_window")

    @classmethod
    def supports_sink(cls) -> bool:
        """Return whether its layers support sinks: a score per head that has no value."""
        return cls.supports_option("sinks")

    @classmethod
    def get_kv_cache_stride_order(cls, layout: KVCacheLayout) -> tuple[int, ...]:
        """Return the memory order of the axes [2, num_blocks, block_size, heads, head_size].

        The axis of keys and values is always the outermost, the elements of a head the innermost.

        Raises:
            ValueError: in this layout the bytes of a layer are not contiguous.
        """
        if not layout.is_layer_compact:
            raise ValueError(
                f"layout = {layout.name}: expected one that begins with L, whose layers have"
                " tensors of their own; reshape_layered_kv_cache takes all"
            )
        axes = {BLOCK: 1, SLOT: 2, HEAD: 3}
        inner = [axes[axis] for axis in layout.stride_order if axis in axes]
        return (0, *inner, 4)


def select_common_block_size(
    kv_manager_block_size: int, backends: Sequence[type[Capabilities]]
) -> int:
    """Return the largest block size that the kernels of all backends support.

    It divides the engine's block size and is usually equal to it.

    Args:
        kv_manager_block_size: slots per block of the engine's allocator, from 1.
        backends: the backends that share the engine's blocks.

    Raises:
        ValueError: the kernels have no common block size that divides the engine's.

    Source:
        vLLM's function of that name.

    Example:
        Blocks of 128, kernels with block size 64 and kernels with multiples of 16: 64.
    """
    check_positive(kv_manager_block_size=kv_manager_block_size)
    for size in range(kv_manager_block_size, 0, -1):
        divides = kv_manager_block_size % size == 0
        if divides and all(_reads(backend, size) for backend in backends):
            return size
    said = "; ".join(
        str(backend.get_supported_kernel_block_sizes()) for backend in backends
    )
    raise ValueError(
        f"kv_manager_block_size = {kv_manager_block_size}: expected a multiple of a size"
        f" that all backends read ({said})"
    )


def _reads(backend: type[Capabilities], block_size: int) -> bool:
    """Return whether a backend's kernels read blocks of that size undivided."""
    sizes = backend.get_supported_kernel_block_sizes()
    return not sizes or any(
        block_size % size.base == 0
        if isinstance(size, MultipleOf)
        else block_size == size
        for size in sizes
    )


def _bases(sizes: Sequence[int | MultipleOf]) -> list[int]:
    return [size.base if isinstance(size, MultipleOf) else size for size in sizes]
