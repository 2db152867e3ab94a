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
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
)
from transformers.masking_utils import sdpa_mask

from ...contract.attention_options import AttentionOptions
from ...contract.operations import Implementation
from ...validation.integrations import load_named
from ...validation.library_caches import check_same_implementation
from ...validation.library_models import (
    check_attention_replaced,
    check_causal_batch,
    check_inference,
    check_layer_kind,
    check_no_step_bias,
)
from .masks import (
    PADDING,
    PaddedColumns,
    VisibleRange,
    ragged_rows,
    read_bidirectional_window,
    read_padded_columns,
    read_position_bias,
)
from .models.compiled import outside_of_compiler
from .models.dtypes import in_one_dtype
from .models.library_copy import ATTENTION, OWN_PREFIX, configs_of
from .models.replaced import Replacement, check_free, replaced
from .own_attention import has_own_attention, replace_attention
from .steps.paged_layer import KeysInPages, attend_pages
from .steps.step import step_of

CALLS: ContextVar[Counter[nn.Module] | None] = ContextVar(
    "pagetwin_calls", default=None
)


def attention_name(implementation: str) -> str:
    """Return the name under which a twin is registered."""
    return f"{OWN_PREFIX}{implementation}"


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

    @outside_of_compiler
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
        in_pages = key.layer if isinstance(key, KeysInPages) else None
        if in_pages is not None:
            (query,) = in_one_dtype(query)
        else:
            query, key, value = in_one_dtype(query, key, value)
        bias = given.get("position_bias")
        has_bias = bias is not None and bool(bias.any())
        visible = _visible_range(module, attention_mask, given, has_bias)
        step = step_of(given.get("pagetwin"), attention_mask)
        if step is not None:
            check_same_implementation(step.batch.name, implementation)
            check_causal_batch(module, visible.causal)
            check_no_step_bias(has_bias)
            arguments = _arguments(query, scaling, visible, None, given)
            out = step.batch.attend(step, module, query, key, value, arguments)
        elif in_pages is not None:
            check_same_implementation(in_pages.implementation, run.name)
            query_len = query.shape[2]
            columns = in_pages.write(module, query_len, attention_mask, visible)
            table = read_position_bias(bias, columns)
            arguments = _arguments(query, scaling, visible, table, given)
            out = attend_pages(run, query, in_pages, columns, arguments)
        else:
            shape = (query.shape[0], query.shape[2], key.shape[2])
            columns = read_padded_columns(attention_mask, *shape, visible)
            table = read_position_bias(bias, columns)
            arguments = _arguments(query, scaling, visible, table, given)
            out = _attend_padded(run, query, key, value, columns, arguments)
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
    with replaced(lambda: _choose_attention(model, name)):
        yield


def _choose_attention(model: Any, name: str) -> list[Replacement]:
    """Return what the library changes to run a model on an attention function."""
    configs = {id(config): config for config in configs_of(model)}.values()
    check_free([Replacement(config, ATTENTION, name, name) for config in configs])
    before = [(config, getattr(config, ATTENTION)) for config in configs]
    try:
        model.set_attn_implementation(name)
        found = model.config._attn_implementation
        check_attention_replaced(type(model).__name__, found, name)
        return [
            Replacement(config, ATTENTION, getattr(config, ATTENTION), name)
            for config in configs
        ]
    finally:
        for config, value in before:
            setattr(config, ATTENTION, value)


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


@outside_of_compiler
def _full_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the library's mask; it contains causality even where the library would omit it.

    The mask notes which queries are padding. Its elements alone do not say so: a query after the
    last token attends to all tokens.
    """
    kwargs["allow_is_causal_skip"] = False
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    tokens, first = kwargs.get("attention_mask"), int(kwargs.get("q_offset") or 0)
    if mask is not None and tokens is not None:
        tokens = tokens[:, first : first + mask.shape[2]].bool()
        # the library takes columns after the end of the given mask for later tokens
        mask.__dict__[PADDING] = ~nn.functional.pad(
            tokens, (0, mask.shape[2] - tokens.shape[1]), value=True
        )
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
    columns: PaddedColumns,
    arguments: dict[str, Any],
) -> Tensor:
    """Return attention of a padded batch; rows of padding are 0.

    Args:
        run: the implementation.
        query: [reqs, query_heads, query_len, head_size].
        key: [reqs, kv_heads, key_len, head_size].
        value: [reqs, kv_heads, key_len, value_head_size].
        columns: the columns that are computed.
        arguments: further arguments of `encoder_attention`.

    Returns:
        [reqs, query_len, query_heads, value_head_size].
    """
    num_reqs, query_heads, query_len, _ = query.shape
    # step: remove the padding, so that the batch is ragged
    device = query.device
    query_rows, query_start_loc, max_query_len = ragged_rows(columns.queries, device)
    key_rows, key_start_loc, max_key_len = ragged_rows(columns.keys, device)
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
