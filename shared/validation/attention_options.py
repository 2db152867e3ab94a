"""Which options of attention are refused?"""

import math
from collections.abc import Collection

import torch
from torch import Tensor

from ..contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ..contract.kinds import FP8_DTYPES
from .primitives import check_dtype, check_length, check_positive, check_same_device

SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def check_options(
    options: AttentionOptions,
    query: Tensor,
    reqs: int,
    out: Tensor | None,
    contents: bool,
) -> None:
    """Refuse options that are out of range, of the wrong shape, or meaningless together.

    Args:
        options: what was asked for.
        query: [tokens, query_heads, head_size].
        reqs: requests in the batch.
        out: where the result goes.
        contents: whether tensors are read.
    """
    check_numbers(options.sliding_window, options.logits_soft_cap)
    if options.attention_chunk_size is not None:
        check_positive(attention_chunk_size=options.attention_chunk_size)
    heads = query.shape[1]
    for name in ("alibi_slopes", "sinks"):
        tensor = getattr(options, name)
        if tensor is not None:
            check_dtype(name, tensor, torch.float32)
            check_length(name, tensor, heads, "query heads")
            check_same_device(query=query, **{name: tensor})
    _check_causal(options, query, reqs)
    _check_tree(options, query, reqs)
    _check_ranges(options, query)
    _check_bias(options, query)
    _check_output_scale(options, query, out, contents)


def reject_options(options: AttentionOptions, names: Collection[str], why: str) -> None:
    """Raise if an option is given that the operation cannot take.

    Args:
        options: What the call was given.
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


def check_numbers(sliding_window: int | None, logits_soft_cap: float | None) -> None:
    """Refuse a window or a cap that no score can have."""
    if sliding_window is not None:
        check_positive(sliding_window=sliding_window)
    if logits_soft_cap is not None and not (
        logits_soft_cap > 0 and math.isfinite(logits_soft_cap)
    ):
        raise ValueError(
            f"logits_soft_cap = {logits_soft_cap}: expected a number above 0, or None for"
            " no cap"
        )


def check_cache_scales(
    options: AttentionOptions, key_cache: Tensor, contents: bool
) -> None:
    """Refuse an FP8 cache without scales, scales without one, and scales out of range."""
    is_quantised = key_cache.dtype in FP8_DTYPES
    for name in ("k_scale", "v_scale"):
        scale = getattr(options, name)
        if scale is None and is_quantised:
            raise ValueError(
                f"{name} = None: expected a scale, as the cache is {key_cache.dtype}; 1.0"
                " takes its numbers as they are"
            )
        if scale is not None and not is_quantised:
            raise ValueError(
                f"{name} is given but the cache is {key_cache.dtype}: expected None, as"
                " only an FP8 cache has scales"
            )
        check_scale(name, scale, {"key_cache": key_cache}, key_cache.shape[2], contents)


def check_scale(
    name: str,
    scale: Tensor | float | None,
    place: dict[str, Tensor],
    heads: int | None,
    contents: bool,
) -> None:
    """Refuse a scale that is not one finite number above 0 for all, or one a kv head.

    Args:
        name: the argument's.
        scale: what was given.
        place: a tensor on whose device it must lie, by its argument's name.
        heads: kv heads; None: only one number for all is taken.
        contents: whether a tensor is read.
    """
    if scale is None:
        return
    if isinstance(scale, Tensor):
        check_dtype(name, scale, torch.float32)
        shapes = [[], [1]] if heads is None else [[], [1], [heads]]
        if list(scale.shape) not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ValueError(
                f"{name} has shape {list(scale.shape)}: expected {expected}"
            )
        check_same_device(**place, **{name: scale})
        numbers = scale.flatten().tolist() if contents else []
    else:
        numbers = [scale]
    for number in numbers:
        # kernels take it in float32, in which 1e-50 is 0 and 1e39 infinite
        if not SMALLEST <= number <= LARGEST:
            raise ValueError(f"{name} = {number}: expected a finite number above 0")


def check_positions(
    options: AttentionOptions, query_lens: list[int], key_lens: list[int]
) -> None:
    """Refuse queries that have no place among the keys, though they must have one."""
    _check_own_place(options, query_lens)
    for req, (query_len, key_len) in enumerate(zip(query_lens, key_lens, strict=True)):
        if query_len <= key_len:
            continue
        causal = options.causal
        if bool(causal[req]) if isinstance(causal, Tensor) else causal:
            raise ValueError(
                f"request {req} has {query_len} queries on {key_len} keys and is causal:"
                " expected its queries to be the last tokens of its sequence"
            )
        if options.counting_positions:
            raise ValueError(
                f"request {req} has {query_len} queries on {key_len} keys and"
                f" {options.counting_positions[0]} is given: expected at most as many queries"
                " as keys, so that each has a position among them"
            )


def _check_own_place(options: AttentionOptions, query_lens: list[int]) -> None:
    """Refuse a tree in which a token does not see itself: it stands one behind those it sees."""
    if options.tree_mask is None:
        return
    width = options.tree_mask.shape[1]
    for req, own in enumerate(options.tree_mask.diagonal(dim1=1, dim2=2).tolist()):
        if query_lens[req] > width or all(own[: query_lens[req]]):
            continue
        token = own.index(False)
        raise ValueError(
            f"tree_mask[{req}, {token}, {token}] = False: expected True, as every new token"
            " sees itself"
        )


def _check_causal(options: AttentionOptions, query: Tensor, reqs: int) -> None:
    if isinstance(options.causal, Tensor):
        check_dtype("causal", options.causal, torch.bool)
        check_length("causal", options.causal, reqs, "requests")
        check_same_device(query=query, causal=options.causal)


def _check_tree(options: AttentionOptions, query: Tensor, reqs: int) -> None:
    mask = options.tree_mask
    if mask is None:
        return
    check_dtype("tree_mask", mask, torch.bool)
    if mask.dim() != 3 or mask.shape[0] != reqs or mask.shape[1] != mask.shape[2]:
        raise ValueError(
            f"tree_mask has shape {list(mask.shape)}: expected [{reqs}, tree, tree], a"
            " square of new tokens for each request"
        )
    check_same_device(query=query, tree_mask=mask)
    if options.causal is not True:
        raise ValueError(
            "tree_mask is given beside causal: expected causal = True, since the mask says"
            " what is seen; a request without a tree has a lower triangle"
        )


def _check_ranges(options: AttentionOptions, query: Tensor) -> None:
    ranges = options.query_ranges
    if ranges is None:
        return
    check_dtype("query_ranges", ranges, torch.int32)
    if ranges.dim() != 2 or tuple(ranges.shape) != (query.shape[0], 2):
        raise ValueError(
            f"query_ranges has shape {list(ranges.shape)}: expected [{query.shape[0]}, 2],"
            " first and last position for each token"
        )
    check_same_device(query=query, query_ranges=ranges)


def _check_bias(options: AttentionOptions, query: Tensor) -> None:
    bias = options.position_bias
    if bias is None:
        return
    check_dtype("position_bias", bias, torch.float32)
    heads = query.shape[1]
    if bias.dim() != 2 or bias.shape[0] != heads or bias.shape[1] % 2 == 0:
        raise ValueError(
            f"position_bias has shape {list(bias.shape)}: expected [{heads}, 2 * reach + 1],"
            " an entry for each distance from -reach to reach"
        )
    check_same_device(query=query, position_bias=bias)


def _check_output_scale(
    options: AttentionOptions, query: Tensor, out: Tensor | None, contents: bool
) -> None:
    is_quantised = out is not None and out.dtype in FP8_DTYPES
    if is_quantised and options.out_scale is None:
        raise ValueError(
            "out_scale = None: expected a scale, as out holds FP8 numbers; 1.0 stores the"
            " result as it is"
        )
    if options.out_scale is not None and not is_quantised:
        given = "None" if out is None else str(out.dtype)
        raise ValueError(
            f"out_scale is given but out is {given}: expected a tensor of"
            f" {' or '.join(map(str, FP8_DTYPES))}"
        )
    check_scale("out_scale", options.out_scale, {"query": query}, None, contents)
