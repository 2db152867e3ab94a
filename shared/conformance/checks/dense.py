"""Dense oracle: attention by torch's scaled_dot_product_attention in float64, and comparators.

`attend` gathers each sequence with a Python loop over positions and calls
scaled_dot_product_attention with an explicit mask. It shares no code with either twin. The
comparators compute errors of a candidate's output and log-sum-exp relative to their budgets.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...contract.budgets import Verdict, judge_rows
from ..base.judged_call import expect_no_call
from ..cases.batches import BatchTensors

Mask = Callable[[int, int, int, int], bool]


def attends_up_to_itself(query: int, key: int, query_len: int, kv_len: int) -> bool:
    """Return whether the query-th new token attends to the key at that position."""
    return key <= kv_len - query_len + query


def attend(
    batch: BatchTensors,
    attends: Mask = attends_up_to_itself,
    kv_head: Callable[[int, int, int], int] = lambda h, q, kv: h * kv // q,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp on the host; rows without a key are 0 and -inf.

    Args:
        batch: The inputs.
        attends: Whether a query attends to a key, from (query, key, query_len, kv_len).
        kv_head: The kv head of a query head, from (query head, query heads, kv heads).
        dtype: Element type of the arithmetic.
    """
    expect_no_call("attend")
    query = batch.query.cpu().to(dtype)
    caches = batch.key_cache.cpu(), batch.value_cache.cpu()
    block_size, kv_heads, head_size = caches[0].shape[1:]
    tokens, query_heads, _ = query.shape
    scale = head_size**-0.5 if batch.plan.scale is None else batch.plan.scale
    heads = [kv_head(head, query_heads, kv_heads) for head in range(query_heads)]
    out = torch.zeros(tokens, query_heads, head_size, dtype=dtype)
    lse = torch.full((query_heads, tokens), -torch.inf, dtype=dtype)
    start = 0
    for query_len, kv_len, row in zip(
        batch.plan.query_lens, batch.plan.kv_lens, batch.rows, strict=True
    ):
        own = slice(start, start + query_len)
        start += query_len
        if not query_len:
            continue
        key, value = (
            torch.stack(
                [cache[row[p // block_size], p % block_size] for p in range(kv_len)], 1
            )[heads].to(dtype)
            for cache in caches
        )  # [query_heads, kv_len, head_size]
        mask = torch.tensor(
            [
                [attends(q, k, query_len, kv_len) for k in range(kv_len)]
                for q in range(query_len)
            ]
        )
        q = query[own].transpose(0, 1)
        out[own] = torch.nn.functional.scaled_dot_product_attention(
            q, key, value, attn_mask=mask, scale=scale
        ).transpose(0, 1)
        scores = torch.einsum("hqd,hkd->hqk", q, key) * scale
        lse[:, own] = scores.masked_fill(~mask, -torch.inf).logsumexp(2)
    return out, lse


def score_size(batch: BatchTensors) -> Tensor:
    """Return [tokens] a bound on the sum of |query * key| * scale over all heads and keys."""
    query = batch.query.cpu().double()[: batch.tokens]
    keys = batch.key_cache.cpu().double()
    bound = torch.where(keys.isnan(), 0.0, keys).abs().flatten(0, -2)
    largest = bound.amax(0) if bound.numel() else bound.new_zeros(query.shape[-1])
    scale = query.shape[-1] ** -0.5 if batch.plan.scale is None else batch.plan.scale
    return (query.abs() @ largest).amax(1) * scale


def judge_lse(batch: BatchTensors, lse: Tensor, exact: Tensor) -> float:
    """Return the largest error of a log-sum-exp divided by its budget; at most 1 is correct.

    A score is a sum of products, each with an error of at most half an eps of its size. The sum of
    exponentials adds a few errors of size 1. Eight eps of both allow for another summation order.
    One key dropped from 4,096 changes the result by 2.4e-4, which is many times the budget.
    """
    live = slice(0, batch.tokens)
    assert bool((lse.cpu()[:, batch.tokens :] == -torch.inf).all())
    error = (lse.cpu().double() - exact.cpu().double())[:, live].abs()
    if not error.numel():
        return 0.0
    assert bool(torch.isfinite(error).all()), (
        "the log-sum-exp of a live row is not a number"
    )
    budget = 8 * torch.finfo(torch.float32).eps * (1 + score_size(batch))
    return float((error / budget).max())


def judge_attention(
    batch: BatchTensors, out: Tensor, reference: Any
) -> tuple[Verdict, Tensor]:
    """Return the comparison of an output with the exact result, and the exact log-sum-exp.

    Args:
        batch: The inputs.
        out: The candidate's output.
        reference: The reference twin, run in float64 and in the candidate's own dtype.
    """
    dtype = batch.plan.dtype
    exact, exact_lse = batch.fresh(torch.float64)
    reference.paged_attention(
        **batch.arguments(), out=exact, lse=exact_lse, compute_dtype=torch.float64
    )
    same = reference.paged_attention(**batch.arguments(), compute_dtype=dtype)
    sizes = torch.empty_like(exact)
    reference.paged_attention(
        **(batch.arguments() | {"value_cache": batch.value_cache.abs()}),
        out=sizes,
        compute_dtype=torch.float64,
    )
    return judge_rows(out, exact, same, dtype, sizes), exact_lse


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor. As bytes, NaN equals itself."""
    # an axis of size 1 may have any stride, and such a tensor cannot be viewed as bytes
    packed = tensor.cpu().clone(memory_format=torch.contiguous_format)
    return packed.view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
