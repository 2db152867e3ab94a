"""Calls that a warm-up launches: small batches of one token each, with the bounds of a kernel."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.cache_formats import head_size_of
from ..dispatch.dispatch import choose_options
from ..runtime.attention_call import AttentionCall
from .warm_up_spec import WarmUpSpec


def make_call(
    spec: WarmUpSpec, index: int, lse: bool, num_reqs: int, seq_len: int = 1
) -> AttentionCall:
    """Return a call of requests of one token each, whose bounds are those of the spec.

    Args:
        seq_len: keys of each request.
    """
    key, value = spec.key_cache, spec.value_cache
    device, block_size = key.device, key.shape[1]
    options = choose_options(_fit_options(spec.options[index], num_reqs), causal=True)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=device)
    blocks = -(-spec.max_seq_len // block_size)
    query, out, lses = (spec.make_rows or _pack_rows(spec))(num_reqs)
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        block_table=torch.zeros(num_reqs, blocks, dtype=torch.int32, device=device),
        query_start_loc=starts,
        lengths=torch.full((num_reqs,), seq_len, dtype=torch.int32, device=device),
        max_query_len=spec.max_query_len,
        max_key_len=spec.max_seq_len,
        scale=head_size_of(key) ** -0.5 if spec.scale is None else spec.scale,
        out=out,
        lse=lses if lse else None,
        options=options,
    )


def _pack_rows(spec: WarmUpSpec) -> Callable[[int], tuple[Tensor, Tensor, Tensor]]:
    """Return what makes packed queries, outputs and log-sum-exps of a number of tokens."""
    device, heads = spec.key_cache.device, spec.num_query_heads
    head_size, value_head_size = map(head_size_of, (spec.key_cache, spec.value_cache))

    def make(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        query = torch.zeros(
            tokens, heads, head_size, dtype=spec.query_dtype, device=device
        )
        out = torch.zeros(
            tokens, heads, value_head_size, dtype=spec.query_dtype, device=device
        )
        lse = torch.zeros(heads, tokens, device=device)
        return query, out.to(spec.out_dtype or spec.query_dtype), lse

    return make


def _fit_options(options: AttentionOptions, num_reqs: int) -> AttentionOptions:
    """Return the options with an entry per request and token of a batch of one token each."""
    changes: dict[str, Any] = {}
    if isinstance(options.causal, Tensor):
        changes["causal"] = options.causal.new_ones(num_reqs)
    if options.tree_mask is not None:
        _, *tree = options.tree_mask.shape
        changes["tree_mask"] = options.tree_mask.new_ones(num_reqs, *tree)
    if options.query_ranges is not None:
        changes["query_ranges"] = options.query_ranges.new_full((num_reqs, 2), -1)
    return replace(options, **changes) if changes else options


def bound_call(
    call: AttentionCall, num_reqs: int, max_query_len: int, max_key_len: int
) -> AttentionCall:
    """Return the call with other bounds. Its requests are as many as it has already."""
    assert call.lengths.shape[0] == num_reqs
    return call._replace(max_query_len=max_query_len, max_key_len=max_key_len)


def tensors_of(
    call: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of a call, in the order of `paged_attention`."""
    assert call.block_table is not None
    return (
        call.query, call.key, call.value, call.block_table, call.query_start_loc,
        call.lengths,
    )  # fmt: skip
