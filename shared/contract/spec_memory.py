"""The memory that one request needs, by the kind of its layers' caches, and the spec of a group.

An engine calls these functions before it allocates anything: to size its block tables, to admit a
request, and to know the longest sequence that fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .checks import check_not_negative, check_positive
from .specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """The limits of an engine that determine how many blocks a request needs.

    Args:
        max_model_len: tokens of the longest sequence.
        max_in_flight_tokens: largest number of new tokens of a request whose steps have begun and
            not ended. Their keys are kept although the window may have passed.
        decode_context_parallel_size: ranks among which the keys of a sequence are divided.
        max_num_encoder_input_tokens: tokens of the longest input of an encoder.
    """

    max_model_len: int
    max_in_flight_tokens: int
    decode_context_parallel_size: int = 1
    max_num_encoder_input_tokens: int = 0

    def __post_init__(self) -> None:
        check_positive(
            max_model_len=self.max_model_len,
            max_in_flight_tokens=self.max_in_flight_tokens,
            decode_context_parallel_size=self.decode_context_parallel_size,
        )
        check_not_negative(
            max_num_encoder_input_tokens=self.max_num_encoder_input_tokens
        )


def max_num_blocks_per_req(
    spec: KVCacheSpec, max_len: int, decode_context_parallel_size: int = 1
) -> int:
    """Return the number of entries of a row of the block table.

    Args:
        spec: content of a block.
        max_len: tokens of the longest sequence; for cross-attention, of the encoder.
        decode_context_parallel_size: ranks among which the keys of a sequence are divided.

    Source:
        vLLM 0.33's method of that name.

    Example:
        1,000 tokens, blocks of 16: 63. On each of two ranks: 32.
    """
    ranks = decode_context_parallel_size if spec.dcp_sharded else 1
    check_positive(max_len=max_len, decode_context_parallel_size=ranks)
    return _cdiv(max_len, spec.block_size * ranks)


def max_admission_blocks_per_request(spec: KVCacheSpec, limits: EngineLimits) -> int:
    """Return the largest number of blocks that a request holds at a time.

    A layer with a window or with chunks frees what it has passed. A window may begin and end
    inside of a block, so it has one block more.

    Args:
        spec: content of a block.
        limits: limits of the engine.

    Source:
        vLLM 0.33's method of that name, which only windows and chunks have there.

    Example:
        A window of 100, 512 tokens in flight, 1,000 tokens, blocks of 16: 611 tokens are in up to
        39 + 1 = 40 blocks.
    """
    size, longest = spec.block_size, limits.max_model_len
    in_flight = limits.max_in_flight_tokens
    match spec:
        case SlidingWindowSpec():
            kept = min(spec.num_retained_tokens + in_flight, longest)
            return _cdiv(kept, size) + 1
        case ChunkedLocalAttentionSpec():
            return _cdiv(min(spec.attention_chunk_size + in_flight, longest), size)
        case CrossAttentionSpec():
            return _cdiv(limits.max_num_encoder_input_tokens, size)
        case _:
            ranks = limits.decode_context_parallel_size
            return max_num_blocks_per_req(spec, longest, ranks)


def max_memory_usage_bytes(spec: KVCacheSpec, limits: EngineLimits) -> int:
    """Return the bytes of one layer's cache that a request needs at most.

    Args:
        spec: content of a block.
        limits: limits of the engine.

    Raises:
        ValueError: the keys of a window would be divided among ranks.

    Source:
        vLLM 0.33's method of that name.

    Example:
        1,000 tokens, blocks of 16, pages of 8,192 bytes: 63 pages, 516,096 bytes.
    """
    ranks = limits.decode_context_parallel_size
    if isinstance(spec, SlidingWindowSpec) and spec.dcp_sharded and ranks > 1:
        raise ValueError(
            f"decode_context_parallel_size = {ranks}: expected 1 for a layer with a window,"
            " or a spec with dcp_sharded = False"
        )
    return max_admission_blocks_per_request(spec, limits) * spec.page_size_bytes


def merge_kv_cache_specs(specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
    """Return the spec of a group whose layers have these specs.

    All specs are equal. Layers that keep their whole sequence may differ in whether they have a
    window, or chunks: the group has the one that some have.

    Args:
        specs: at least one.

    Raises:
        ValueError: `specs` is empty, or they differ in the named field.

    Source:
        vLLM's `KVCacheSpec.merge`.

    Example:
        Full attention without a window and with a window of 128: a window of 128.
    """
    if not specs:
        raise ValueError("specs is empty: expected the specs of at least one layer")
    visible: dict[str, Any] = {}
    if all(isinstance(spec, FullAttentionSpec) for spec in specs):
        for name in ("sliding_window", "attention_chunk_size"):
            given = [getattr(spec, name) for spec in specs]
            visible[name] = next((size for size in given if size is not None), None)
        if None not in visible.values():
            raise ValueError(
                f"sliding_window = {visible['sliding_window']} and attention_chunk_size ="
                f" {visible['attention_chunk_size']}: expected one of them in a group"
            )
    merged = replace(specs[0], **visible)
    for index, spec in enumerate(specs):
        if type(spec) is not type(merged):
            raise ValueError(
                f"specs[{index}] is a {type(spec).__name__}: expected"
                f" {type(merged).__name__}, as specs[0]"
            )
        for field in fields(merged):
            here, there = getattr(spec, field.name), getattr(merged, field.name)
            if here != there and not (field.name in visible and here is None):
                raise ValueError(
                    f"specs[{index}].{field.name} = {here}: expected {there}, as the other"
                    " layers of the group"
                )
    return merged


def _cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)
