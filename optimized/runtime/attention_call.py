"""Description of one attention call, and the signature that selects its launch plan."""

from operator import mul
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...contract.argument_kinds import INT32
from ...contract.attention_options import OPTIONS_PER_BATCH, AttentionOptions
from ...contract.cache_formats import CODES_PER_ELEMENT
from ...validation.score_numbers import is_score_scale
from .launcher import INTERPRETED

Signature: TypeAlias = tuple[Any, ...]

KEY_BOUND_STEP = 64
"""Launches follow from the most keys of a request, rounded up to a multiple of this many.

A KV tile has at least as many keys. Each decode step has one key more than the step before, and so
its launches are those of the step before, which are known."""


class AttentionCall(NamedTuple):
    """One attention call, as every kernel family receives it.

    Args:
        query: [tokens, query_heads, head_size].
        key, value: [num_blocks, block_size, kv_heads, head_size] with a block table, or
            [key_tokens, kv_heads, head_size] without one (ragged).
        block_table: [reqs, max_blocks]. Optional. If None, keys and values are ragged.
        query_start_loc: [reqs + 1] index of each request's first query.
        lengths: [reqs] keys per request. If keys are ragged, [reqs + 1] index of each request's
            first key.
        max_query_len, max_key_len: upper bounds over the requests.
        scale: factor of the scores. Kernels receive a float. Before dispatch it may be None,
            which means head_size**-0.5.
        out: [tokens, query_heads, value_head_size], modified in place. Before dispatch it may be
            None, which means a new tensor.
        lse: [query_heads, tokens], modified in place. Optional. If None, it is not computed.
        options: masks, score modifications and FP8 scales.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    block_table: Tensor | None
    query_start_loc: Tensor
    lengths: Tensor
    max_query_len: int
    max_key_len: int
    scale: Any
    out: Any
    lse: Tensor | None
    options: AttentionOptions


def sign(call: AttentionCall) -> Signature | None:
    """Return what a call has in common with all calls that its launch plan serves.

    The signature leaves out everything that changes from step to step: the number of tokens,
    requests and entries of the block table, the bounds, the scale, and the number of ragged keys.
    `sizes_fit` validates those. Of the ragged keys two facts stay: whether there are any (an empty
    tensor has no tensor map), and whether 32-bit offsets reach all of them.

    Returns:
        a hashable tuple. None if the call must be planned anew each time: in the interpreter, and
        if an option is a tensor that belongs to this batch alone.
    """
    if INTERPRETED:
        return None
    of_options = call.options.numbers
    if of_options is None:
        of_options = sign_options(call.options)
        if of_options is None:
            return None
    query, key, value, block_table, query_start_loc, lengths, _, _, _, out, lse, _ = (
        call
    )
    key_strides, value_strides = key.stride(), value.stride()
    if block_table is None:
        key_shape, value_shape = key.shape, value.shape
        of_keys: Any = (
            key_shape[1:],
            value_shape[1:],
            key_shape[0] > 0,
            # whether offsets of elements exceed 32 bits
            _extent(key_shape, key_strides) >= 2**31
            or _extent(value_shape, value_strides) >= 2**31,
        )
        of_table = None
    else:
        of_keys = (key.shape, value.shape)
        of_table = (
            block_table.stride()[1:],
            block_table.dtype,
            block_table.get_device(),
        )
    return (
        query.shape[1:],
        query.stride(),
        query.dtype,
        query.get_device(),
        of_keys,
        key_strides,
        key.dtype,
        key.get_device(),
        value_strides,
        value.dtype,
        value.get_device(),
        of_table,
        query_start_loc.stride(),
        query_start_loc.dtype,
        query_start_loc.get_device(),
        lengths.stride(),
        lengths.dtype,
        lengths.get_device(),
        None if out is None else (out.stride(), out.dtype, out.get_device()),
        None if lse is None else (lse.dtype, lse.get_device()),
        of_options,
    )


def sizes_fit(call: AttentionCall) -> bool:
    """Return whether the sizes and numbers that a signature leaves out are valid."""
    (
        query, key, value, block_table, query_start_loc, lengths, _, _, scale, out, lse, _,
    ) = call  # fmt: skip
    tokens, query_heads, _ = query.shape
    reqs = query_start_loc.shape[0] - 1
    value_size = value.shape[-1] * CODES_PER_ELEMENT.get(value.dtype, 1)
    if block_table is None:
        fits = (
            lengths.shape[0] == reqs + 1 > 0
            and key.shape[0] == value.shape[0]
            and 0 <= call.max_key_len <= INT32
        )
    else:
        rows, max_blocks = block_table.shape
        max_keys = max_blocks * value.shape[1]
        fits = rows == reqs == lengths.shape[0] and 0 <= call.max_key_len <= max_keys
    return (
        fits
        and 0 <= call.max_query_len <= INT32
        and is_score_scale(scale)
        # an expanded result is validated, and so rejected, and one that begins with what is read
        and (
            out is None
            or (
                out.shape == (tokens, query_heads, value_size)
                and 0 not in out.stride()
                and not (
                    (address := out.data_ptr())
                    and address in (query.data_ptr(), key.data_ptr(), value.data_ptr())
                )
            )
        )
        and (
            lse is None
            or (lse.shape == (query_heads, tokens) and 0 not in lse.stride())
        )
    )


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return an upper bound of the offset of a tensor's last element."""
    return sum(map(mul, shape, strides))


def round_key_bound(call: AttentionCall) -> int:
    """Return an upper bound of the call's keys per request, from which its launches follow.

    Returns:
        `max_key_len`, rounded up as far as the block table allows. It is returned as it is for
        ragged keys, if no request has keys before its new tokens, and if the call is not valid.

    Example:
        4,001 to 4,032 and 4,033 to 4,096 keys: 4,032 and 4,096.
    """
    bound, table = call.max_key_len, call.block_table
    if table is None or bound <= call.max_query_len:
        return bound
    try:
        max_keys = table.shape[1] * call.value.shape[1]
    except IndexError:
        # not validated yet, and has another number of axes
        return bound
    if bound > max_keys:
        return bound
    return min(-(-bound // KEY_BOUND_STEP) * KEY_BOUND_STEP, max_keys)


def sign_options(options: AttentionOptions) -> Signature | None:
    """Return options as a hashable tuple; None if a tensor belongs to this batch alone.

    Options without a tensor have this tuple as their attribute `numbers`.
    """
    found: list[Any] = []
    for name in options.given:
        value = getattr(options, name)
        if not isinstance(value, Tensor):
            found.append((name, value))
        elif name in OPTIONS_PER_BATCH:
            return None
        else:
            is_graded = value.requires_grad and torch.is_grad_enabled()
            place = value.dtype, value.get_device(), is_graded
            found.append((name, value.shape, value.stride(), *place))
    return tuple(found)
