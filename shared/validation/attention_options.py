"""Validation of the options of an attention call, each alone and together."""

from collections.abc import Collection

from torch import Tensor

from ..contract.argument_tensors import reject_gradients
from ..contract.attention_options import (
    DEFAULT_OPTIONS,
    AttentionOptions,
    unpack_options,
)
from ..contract.cache_formats import find_format
from .formats import check_format_scale
from .option import OptionCall
from .options import OPTIONS
from .options.tree_mask import validate_diagonal
from .scales import check_out_scale
from .scales import check_scale as check_scale


def check_options(
    options: AttentionOptions,
    query: Tensor,
    reqs: int,
    out: Tensor | None,
    contents: bool,
) -> None:
    """Raise if an option is out of range, has a wrong shape, or contradicts another option.

    Args:
        options: Options of the call.
        query: [tokens, query_heads, head_size].
        reqs: Number of requests.
        out: Optional. The tensor for the result.
        contents: Whether elements of tensors are read.
    """
    call = OptionCall(options, query, reqs, contents)
    for name, option in OPTIONS.items():
        if getattr(options, name) is not None:
            option.validate(getattr(options, name), call)
    reject_gradients(**unpack_options(options))
    check_out_scale(options, query, out, contents)


def check_cache_scales(
    options: AttentionOptions, key_cache: Tensor, value_cache: Tensor, contents: bool
) -> None:
    """Raise if the scales of a cache do not fit its format, or are those of two formats."""
    if options.k_scale is not None and options.v_scale is not None:
        of_keys = find_format(key_cache.dtype, options.k_scale)
        of_values = find_format(key_cache.dtype, options.v_scale)
        if of_keys is not of_values:
            raise ValueError(
                f"k_scale belongs to the format {of_keys.name} and v_scale to {of_values.name}:"
                " expected one format, since keys and values have the same"
            )
    k_scale, v_scale = options.k_scale, options.v_scale
    check_format_scale("k_scale", k_scale, key_cache, contents, v_scale)
    check_format_scale("v_scale", v_scale, value_cache, contents, k_scale)
    form = find_format(key_cache.dtype, k_scale)
    for name in ("k_global_scale", "v_global_scale"):
        number = getattr(options, name)
        if form.channels_per_scale and number is None:
            raise ValueError(
                f"{name} = None: expected a number, which block scales are multiplied by; 1.0 takes"
                " them as they are"
            )
        if number is not None and not form.channels_per_scale:
            raise ValueError(
                f"{name} is given but the cache has the format {form.name}: expected None, as only"
                " block scales are multiplied by it"
            )
        check_scale(name, number, {}, None, contents)


def reject_options(options: AttentionOptions, names: Collection[str], why: str) -> None:
    """Raise if an option is given that the operation cannot take.

    Args:
        options: Options of the call.
        names: The options that the operation cannot take.
        why: The reason, as the end of "expected None, since ...".

    Raises:
        NotImplementedError: One of them is given.
    """
    for name in options.given:
        if name in names:
            plain = getattr(DEFAULT_OPTIONS, name)
            raise NotImplementedError(
                f"{name} is given: expected {plain}, since {why}; paged_attention takes it"
            )


def check_positions(
    options: AttentionOptions, query_lens: list[int], key_lens: list[int]
) -> None:
    """Raise if queries have no position among the keys and an option depends on it."""
    if options.tree_mask is not None:
        validate_diagonal(options.tree_mask, query_lens)
    for req, (query_len, key_len) in enumerate(zip(query_lens, key_lens, strict=True)):
        if query_len <= key_len:
            continue
        causal = options.causal
        if bool(causal[req]) if isinstance(causal, Tensor) else causal:
            raise ValueError(
                f"request {req} has {query_len} queries on {key_len} keys and is causal:"
                " expected its queries to be the last tokens of its sequence"
            )
        if options.given_by_position:
            raise ValueError(
                f"request {req} has {query_len} queries on {key_len} keys and"
                f" {options.given_by_position[0]} is given: expected at most as many queries"
                " as keys, so that each has a position among them"
            )
