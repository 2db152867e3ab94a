"""Calls of xFormers' paged split-K operator.

The operator is pure Triton, but xFormers' dispatcher rejects it if torch was built for another CUDA
version than xFormers' compiled extension. So it is called directly, on a subclass that declares
what the operator needs: it reads `BLOCK_N` keys at once, which must divide the block size.
"""

import logging
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...contract.layer_pages import layer_format
from ...contract.metadata_classes import PagedAttentionMetadata
from ...engine.attention_impl import AttentionImpl
from ...engine.triton_versions import release
from ..runtime.launcher import INTERPRETED, check_launch, must_widen

HEAD_SIZES_OF_SPLIT_K = (32, 64, 128, 256)
FITS = "xformers 0.0.35 with torch 2.10 to 2.14 and triton 3.6 to 3.8"


def what_fits() -> str:
    """Return which versions of xFormers can be used on this machine, and how to install them."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) == ("Linux", "x86_64"):
        return f"expected {FITS}; pip install 'pagetwin[xformers]' installs it"
    return (
        f"expected Linux on x86_64, for which xFormers has wheels (here: {system} on"
        f" {machine}); the TRITON backend has the same operations"
    )


@cache
def why_no_xformers() -> list[str]:
    """Return why xFormers' operator cannot be used. If the list is empty, it can."""
    if find_spec("xformers") is None:
        return [f"xFormers is not installed: {what_fits()}"]
    import triton

    if release(triton.__version__) >= (3, 9):
        return [
            "xFormers' operator uses block pointers, which triton 3.9 removed (here:"
            f" {triton.__version__}): {what_fits()}"
        ]
    try:
        with _without_warnings("xformers"):
            import xformers
            from xformers.ops.fmha import triton_splitk
    except Exception as error:  # a broken installation fails in many ways
        return [
            f"xFormers cannot be imported ({type(error).__name__}: {error}): {what_fits()}"
        ]
    if triton_splitk.FwOp.OPERATOR is None:
        return [
            f"xFormers {xformers.__version__} finds no usable triton (here:"
            f" {triton.__version__}, torch {torch.__version__}): {what_fits()}"
        ]
    return []


@contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    """Drop a logger's warnings for the duration of an import.

    xFormers warns at length that its compiled extension does not load. It is not used here.
    """

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger = logging.getLogger(name)
    logger.addFilter(is_error)
    try:
        yield
    finally:
        logger.removeFilter(is_error)


def why_no_split_k(impl: AttentionImpl) -> str:
    """Return why a layer's decodes cannot run in the operator. If empty, they can.

    Its kernel compiles for heads of 32, 64, 128 and 256 only. It needs keys and values of one size
    and of the query's dtype, and has no windows and no score modifications.
    """
    if impl.is_uncached:
        return f"attn_type = '{impl.attn_type}': nothing is cached, and nothing decodes"
    sizes = ", ".join(map(str, HEAD_SIZES_OF_SPLIT_K))
    if impl.head_size not in HEAD_SIZES_OF_SPLIT_K:
        return f"head_size = {impl.head_size}: its kernel takes {sizes}"
    if impl.head_size_v != impl.head_size:
        return (
            f"head_size_v = {impl.head_size_v}: its kernel takes values as long as keys"
        )
    if layer_format(impl.kv_cache_dtype).is_quantised:
        return f"kv_cache_dtype = '{impl.kv_cache_dtype}': its kernel has no scales"
    lacking = {
        "sliding_window": impl.sliding_window != (-1, -1),
        "logits_soft_cap": bool(impl.logits_soft_cap),
        "alibi_slopes": impl.alibi_slopes is not None,
        "sinks": impl.sinks is not None,
        "attention_chunk_size": impl.attention_chunk_size is not None,
        "position_bias": impl.position_bias is not None,
    }
    for name, is_given in lacking.items():
        if is_given:
            return f"{name} is given, which its kernel lacks"
    return ""


def why_no_mask(decodes: PagedAttentionMetadata) -> str:
    """Return why a step's decodes cannot run in the operator. If empty, they can.

    Whether they are causal does not matter: the one query of a decode is the last of its sequence.
    """
    if decodes.max_query_len > 1:
        return (
            f"a decode brings {decodes.max_query_len} tokens: the mask here is of one"
        )
    for name in ("tree_mask", "query_ranges"):
        if getattr(decodes, name) is not None:
            return f"{name} is given, for which xFormers has no paged mask"
    return ""


def build_decode_bias(seq_lens: list[int], block_table: Tensor, block_size: int) -> Any:
    """Return xFormers' mask of a batch of decodes.

    Args:
        seq_lens: [reqs] number of keys per request, from 0. Without keys the output is zero.
        block_table: [reqs, max_blocks].
        block_size: slots per block.

    Raises:
        ImportError: xFormers cannot be used; the message says why.
    """
    if reasons := why_no_xformers():
        raise ImportError("; ".join(reasons))
    from xformers.ops.fmha.attn_bias import (
        PagedBlockDiagonalCausalWithOffsetPaddedKeysMask as Mask,
    )

    # some of the mask's tensors are created on the default device, whatever `device` says
    with torch.device(block_table.device):
        return Mask.from_seqlens(
            q_seqlen=[1] * len(seq_lens),
            kv_seqlen=seq_lens,
            page_size=block_size,
            block_tables=block_table,
            device=block_table.device,
        )


def split_k_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, bias: Any, scale: float
) -> Tensor:
    """Return attention of one query per request, computed by xFormers.

    Args:
        query: [reqs, query_heads, head_size].
        key_cache, value_cache: [num_blocks, block_size, kv_heads, head_size].
        bias: what build_decode_bias returned.
        scale: factor of the scores.

    Returns:
        [reqs, query_heads, head_size].

    Raises:
        ValueError: the mask was built for another block size, or compiled kernels cannot read the
            tensors.
    """
    from xformers.ops.fmha import Inputs

    reqs, query_heads, head_size = query.shape
    num_blocks, block_size, kv_heads, _ = key_cache.shape
    if bias.page_size != block_size:
        raise ValueError(
            f"the metadata was built for blocks of {bias.page_size}: expected"
            f" {block_size}, as the cache has; build it for the group of this layer"
        )
    check_launch(query)
    group_size = query_heads // kv_heads
    dtype = torch.float32 if must_widen(query.dtype) else query.dtype
    # all slots as one sequence; the heads of a group read the same keys through stride 0
    slots = (1, num_blocks * block_size, kv_heads, 1, head_size)
    shared = (1, num_blocks * block_size, kv_heads, group_size, head_size)
    inputs = Inputs(
        query=query.to(dtype).view(1, reqs, kv_heads, group_size, head_size),
        key=key_cache.to(dtype).reshape(slots).expand(shared),
        value=value_cache.to(dtype).reshape(slots).expand(shared),
        attn_bias=bias,
        scale=scale,
    )
    result, _ = _operator(block_size).apply(inputs, needs_gradient=False)
    return result.reshape(reqs, query_heads, head_size).to(query.dtype)


@cache
def _operator(block_size: int) -> Any:
    """Return the operator whose tile of keys divides the block size."""
    from xformers.ops.fmha import triton_splitk

    class PagedSplitK(triton_splitk.FwOp):  # type: ignore[misc]
        BLOCK_N = next(keys for keys in (64, 32, 16) if block_size % keys == 0)

        @classmethod
        def get_extra_args(cls, **shape: Any) -> dict[str, Any]:
            # the original reads the CUDA capability, which does not exist in the interpreter
            if INTERPRETED:
                return {"BLOCK_M": cls.BLOCK_M, "BLOCK_N": cls.BLOCK_N}
            return super().get_extra_args(**shape)

    return PagedSplitK
