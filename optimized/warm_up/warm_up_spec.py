"""What `warm_up` compiles for: the layers, caches and batches of an engine."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.cache_formats import find_format
from ...validation.score_numbers import check_score_scale
from ..runtime.launcher import is_capturing


@dataclass(frozen=True, kw_only=True)
class WarmUpSpec:
    """The calls that an engine will make.

    Args:
        key_cache, value_cache: [num_blocks, block_size, kv_heads, head_size] one layer's cache as
            the engine passes it. Its contents are not changed. Scales are in the options.
        num_query_heads: query heads of a layer.
        max_num_reqs: requests of a batch, at most.
        max_query_len: new tokens of a request, at most.
        max_seq_len: keys of a sequence, at most.
        dtype: Optional. Dtype of queries, new keys and values, and outputs. If None, that of the
            cache, or bfloat16 with a quantized cache.
        out_dtype: Optional. Dtype of the output. If None, that of the queries.
        options: the options of each kind of layer. Tensors with an entry per request or token may
            have any number of entries.
        scale: Optional. That of the calls. If None, 1 / sqrt(head size).
        lse: whether calls pass a float32 `lse`, for each kind of call.
        cascades: whether `cascade_attention` is called too.
        make_rows: Optional. Returns query, output and `lse` of a number of tokens, with the
            strides of the calls. If None, they are packed.
        kv_cache_dtype: Optional. Name of the cache's format, as `reshape_and_cache` takes it. If
            None, the first one of its dtype and scales.
        num_threads: Optional. Threads that compile. With 1, the kernels are compiled one after the
            other. If None, as many as CPUs that the process may use, at most 16.
    """

    key_cache: Tensor
    value_cache: Tensor
    num_query_heads: int
    max_num_reqs: int
    max_query_len: int
    max_seq_len: int
    dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    options: tuple[AttentionOptions, ...] = (DEFAULT_OPTIONS,)
    scale: float | None = None
    lse: tuple[bool, ...] = (False,)
    cascades: bool = False
    make_rows: Callable[[int], tuple[Tensor, Tensor, Tensor]] | None = None
    kv_cache_dtype: str | None = None
    num_threads: int | None = None

    @property
    def query_dtype(self) -> torch.dtype:
        """The dtype of queries, new keys and values."""
        cached = self.key_cache.dtype
        is_quantised = find_format(cached).is_quantised
        return self.dtype or (torch.bfloat16 if is_quantised else cached)


def check_spec(spec: WarmUpSpec) -> None:
    """Reject a spec that no call fits.

    Raises:
        ValueError, RuntimeError: as `warm_up`.
    """
    numbers = ("num_query_heads", "max_num_reqs", "max_query_len", "max_seq_len")
    threads = () if spec.num_threads is None else ("num_threads",)
    for name in (*numbers, *threads):
        number = getattr(spec, name)
        if type(number) is not int or number < 1:
            raise ValueError(f"{name} = {number!r}: expected an integer of at least 1")
    for name in ("key_cache", "value_cache"):
        if getattr(spec, name).dim() != 4 or not getattr(spec, name).numel():
            raise ValueError(
                f"{name} has shape {list(getattr(spec, name).shape)}: expected"
                " [num_blocks, block_size, kv_heads, head_size], none of them 0"
            )
        cached = getattr(spec, name).dtype
        if not find_format(cached).is_quantised and cached != spec.query_dtype:
            given = "dtype" if spec.dtype else "dtype (that of key_cache)"
            raise ValueError(
                f"{given} = {spec.query_dtype} and {name} is {cached}: expected the same dtype,"
                " or a quantized cache"
            )
    kv_heads = spec.key_cache.shape[2]
    if spec.num_query_heads % kv_heads:
        raise ValueError(
            f"num_query_heads = {spec.num_query_heads} is not a multiple of the cache's"
            f" {kv_heads} kv heads"
        )
    if spec.max_query_len > spec.max_seq_len:
        raise ValueError(
            f"max_query_len = {spec.max_query_len}: expected at most max_seq_len ="
            f" {spec.max_seq_len}, since new tokens are part of their sequence"
        )
    check_score_scale(spec.scale)
    for name in ("options", "lse"):
        if not getattr(spec, name):
            raise ValueError(f"{name} is empty: expected an entry per kind of call")
    if spec.key_cache.is_cuda and is_capturing():
        raise RuntimeError(
            "a CUDA graph is being captured: call warm_up before the capture, since kernels"
            " are not compiled inside it"
        )
