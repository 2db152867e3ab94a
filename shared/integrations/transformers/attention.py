"""The attention function that models of the library call.

`register` registers a twin under "pagetwin_reference" or "pagetwin_optimized", together with a
function that makes the masks. The attention function supports three kinds of calls: in a step of a
`PagedBatch`, with keys in a `PagedCache`, and with plain key and value tensors that are padded to
one length and become one ragged batch. A call that it cannot compute exactly raises.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ...contract.attention_options import AttentionOptions
from ...contract.operations import Implementation
from ...validation.integrations import (
    check_attention_replaced,
    check_causal_batch,
    check_inference,
    check_layer_kind,
    check_same_implementation,
    load_named,
)
from .masks import (
    PaddedRanges,
    VisibleRange,
    read_bidirectional_window,
    read_padded_ranges,
    read_position_bias,
)
from .own_attention import has_own_attention, replace_attention
from .paged_batch import batch_of
from .paged_cache import KeysInPages, attend_pages

CALLS: ContextVar[Counter[nn.Module] | None] = ContextVar(
    "pagetwin_calls", default=None
)


def attention_name(implementation: str) -> str:
    """Return the name under which a twin is registered."""
    return f"pagetwin_{implementation}"


def register(implementation: str = "optimized") -> str:
    """Register a twin with the library, and return its name there.

    A second call with the same argument changes nothing.

    Args:
        implementation: "reference", "optimized", or the dotted name of a package with the same
            operations.

    Returns:
        The name for `model.set_attn_implementation(...)`.

    Raises:
        ValueError: the implementation cannot be loaded.
    """
    run = load_named(implementation)

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        check_inference(query, dropout)
        _count(module)
        bias = read_position_bias(given.get("position_bias"))
        visible = _visible_range(module, attention_mask, given, bias is not None)
        arguments = _arguments(query, scaling, visible, bias, given)
        batch = given.get("pagetwin") or batch_of(attention_mask)
        if batch is not None:
            check_same_implementation(batch.name, implementation)
            check_causal_batch(module, visible.causal)
            out = batch.attend(module, query, key, value, arguments)
        elif isinstance(key, KeysInPages):
            out = attend_pages(run, query, key, attention_mask, visible, arguments)
        else:
            shape = (query.shape[0], query.shape[2], key.shape[2])
            ranges = read_padded_ranges(attention_mask, *shape, visible)
            out = _attend_padded(run, query, key, value, ranges, arguments)
        return out, None

    name = attention_name(implementation)
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _full_mask)
    return name


def register_all() -> tuple[str, str]:
    """Register both twins with the library, and return their names there."""
    return register("reference"), register("optimized")


@contextmanager
def use_attention(model: Any, implementation: str = "optimized") -> Iterator[None]:
    """Run a model's attention on a twin inside of the block, and restore it afterwards.

    It supports what `model.set_attn_implementation(register(...))` supports, and also Bloom, Falcon
    and MPT, whose attention modules it replaces. These three run in steps of a `PagedBatch` only.

    Args:
        model: a model of transformers.
        implementation: "reference", "optimized", or the dotted name of a package with the same
            operations.

    Raises:
        NotImplementedError: the model does not let its attention be replaced.
        ValueError: the implementation cannot be loaded.
    """
    name = register(implementation)
    if has_own_attention(model):
        with replace_attention(model, name):
            yield
        return
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        found = model.config._attn_implementation
        check_attention_replaced(type(model).__name__, found, name)
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def count_calls(model: nn.Module) -> Iterator[Counter[str]]:
    """Count how often each attention module of a model runs on a twin.

    Args:
        model: the model whose modules give the names.

    Returns:
        The counts by module name. They are filled in when the block ends.

    Example:
        >>> with count_calls(model) as calls:  # doctest: +SKIP
        ...     model(input_ids)
        >>> calls  # doctest: +SKIP
        Counter({'model.layers.0.self_attn': 1, 'model.layers.1.self_attn': 1})
    """
    counted: Counter[nn.Module] = Counter()
    calls: Counter[str] = Counter()
    token = CALLS.set(counted)
    try:
        yield calls
    finally:
        CALLS.reset(token)
        names = {module: name for name, module in model.named_modules()}
        for module, count in counted.items():
            calls[names.get(module, type(module).__name__)] += count


def _count(module: nn.Module) -> None:
    counted = CALLS.get()
    if counted is not None:
        counted[module] += 1


def _full_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the library's mask; it contains causality even where the library would omit it."""
    kwargs["allow_is_causal_skip"] = False
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def _visible_range(
    module: nn.Module, mask: Tensor | None, given: Mapping[str, Any], has_bias: bool
) -> VisibleRange:
    """Return the visible range of a layer."""
    causal = given.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    window = given.get("sliding_window")
    chunk = check_layer_kind(module, window, bool(causal))
    visible = VisibleRange(bool(causal), window, chunk, has_bias)
    if causal or window is None or mask is None:
        return visible
    return replace(visible, sliding_window=read_bidirectional_window(mask, window))


def _arguments(
    query: Tensor,
    scaling: float | None,
    visible: VisibleRange,
    bias: Tensor | None,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the arguments that both attention operations take besides tensors."""
    sinks, slopes = given.get("s_aux"), given.get("alibi_slopes")
    arguments: dict[str, Any] = {
        "options": AttentionOptions(
            causal=visible.causal,
            sliding_window=visible.sliding_window,
            attention_chunk_size=visible.attention_chunk_size,
            logits_soft_cap=given.get("softcap"),
            sinks=None if sinks is None else sinks.detach().float(),
            alibi_slopes=None if slopes is None else slopes.float(),
            position_bias=bias,
        )
    }
    if scaling is not None:
        arguments["scale"] = scaling
    if query.dtype == torch.float64:
        arguments["compute_dtype"] = torch.float64
    return arguments


def _attend_padded(
    run: Implementation,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ranges: PaddedRanges,
    arguments: dict[str, Any],
) -> Tensor:
    """Return attention of a padded batch; rows of padding are 0.

    Args:
        run: the implementation.
        query: [reqs, query_heads, query_len, head_size].
        key: [reqs, kv_heads, key_len, head_size].
        value: [reqs, kv_heads, key_len, value_head_size].
        ranges: the columns that are tokens.
        arguments: further arguments of `encoder_attention`.

    Returns:
        [reqs, query_len, query_heads, value_head_size].
    """
    num_reqs, query_heads, query_len, _ = query.shape
    # step: remove the padding, so that the batch is ragged
    query_rows, query_start_loc, max_query_len = _rows(ranges.queries, query)
    key_rows, key_start_loc, max_key_len = _rows(ranges.keys, key)
    # step: compute attention
    ragged = run.encoder_attention(
        _flat(query)[query_rows],
        _flat(key)[key_rows],
        _flat(value)[key_rows],
        query_start_loc,
        key_start_loc,
        max_query_len,
        max_key_len,
        **arguments,
    )
    # step: insert the padding again
    out = value.new_zeros(num_reqs * query_len, query_heads, value.shape[-1])
    out[query_rows] = ragged
    return out.view(num_reqs, query_len, query_heads, -1)


def _flat(padded: Tensor) -> Tensor:
    """Return [reqs * columns, heads, elements] of [reqs, heads, columns, elements]."""
    return padded.transpose(1, 2).flatten(0, 1)


def _rows(ranges: list[tuple[int, int]], padded: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the rows of the flat batch that are tokens, their starts, and the maximum count."""
    column = torch.arange(padded.shape[2])
    first, end = torch.tensor(ranges, dtype=torch.int64).reshape(-1, 2).unbind(1)
    is_token = (column >= first[:, None]) & (column < end[:, None])
    lengths = is_token.sum(1)
    starts = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    rows = is_token.flatten().nonzero().flatten()
    longest = max(lengths.tolist(), default=0)
    return rows.to(padded.device), starts.to(padded.device), longest
