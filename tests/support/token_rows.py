"""Rows of the small engines: drawn from tokens, and compared with attention by hand.

Query, key and value of a position follow from the tokens up to it. So requests with a common prefix
have the same ones, and a request that is computed again after a preemption gets them again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from pagetwin.conformance.oracles.brute_force import (
    OracleRequest,
    attend_by_hand,
    judge_out,
    quantise_by_hand,
)
from pagetwin.conformance.oracles.cache_formats import decode_by_hand, encode_by_hand
from pagetwin.contract.cache_formats import CacheFormat
from torch import Tensor

PRIME = 997


class Rows(NamedTuple):
    """Rows of consecutive positions of a sequence: [positions, heads, size] each."""

    query: Tensor
    key: Tensor
    value: Tensor


class TokenRows:
    """Rows of heads of a size.

    Args:
        heads, kv_heads, size: those of a layer.
        seed: where the numbers begin.
    """

    def __init__(self, heads: int, kv_heads: int, size: int, seed: int = 0) -> None:
        self.heads = [heads, kv_heads, kv_heads]
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(PRIME, sum(self.heads), size, generator=generator)

    def of(self, token_ids: Sequence[int], first: int = 0) -> Rows:
        """Return the rows of a sequence from a position on."""
        numbers, known = [], 7
        for token in token_ids:
            known = (known * 31 + token + 1) % PRIME
            numbers.append(known)
        found = self.table[torch.tensor(numbers[first:], dtype=torch.int64)]
        return Rows(*found.split(self.heads, 1))

    def step(self, scheduled: Sequence[Any], padding: int) -> Rows:
        """Return the new rows of a step's requests, in order, and then rows of NaN."""
        own = [
            self.of(
                request.request.token_ids[: end_of(request)],
                request.num_computed_tokens,
            )
            for request in scheduled
        ]
        return Rows(
            *(
                torch.cat([*rows, torch.full((padding, *rows[0].shape[1:]), torch.nan)])
                for rows in zip(*own, strict=True)
            )
        )

    def error(
        self,
        scheduled: Sequence[Any],
        new: Rows,
        out: Tensor,
        window: int | None,
        fp8: torch.dtype | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        form: CacheFormat | None = None,
    ) -> float:
        """Return the error of a step's output divided by its budget; at most 1 is correct.

        Args:
            scheduled: the requests, as the scheduler gives them.
            new: what `step` returned; the queries may be those of some heads alone.
            out: [tokens, heads, size], whose padding is not compared.
            window: Optional. Keys that a query attends to. If None, all.
            fp8: Optional. Dtype of the cache. If None, keys and values are not quantised.
            k_scale, v_scale: those of an FP8 cache, or what multiplies block scales.
            form: Optional. A format whose scales are measured. If None, they are not.
        """
        requests, first = [], 0
        for request in scheduled:
            _, key, value = self.of(request.request.token_ids[: end_of(request)])
            if fp8:
                key = quantise_by_hand(key, k_scale, fp8)
                value = quantise_by_hand(value, v_scale, fp8)
            if form is not None:
                numbers = (k_scale, v_scale) if form.has_global_scale else (None, None)
                key, value = (
                    through_codes(form, states, number)
                    for states, number in zip((key, value), numbers, strict=True)
                )
            last = first + request.num_scheduled_tokens
            requests.append(OracleRequest(new.query[first:last], key, value))
            first = last
        options: dict[str, Any] = {"causal": True, "scale": out.shape[-1] ** -0.5}
        if window is not None:
            options["sliding_window"] = window
        if fp8:
            options |= {"k_scale": k_scale, "v_scale": v_scale}
        answer = attend_by_hand(requests, options, first)
        verdict = judge_out(out[:first], answer, answer.out, out.dtype)
        return verdict.worst if verdict.finite else float("inf")


def through_codes(
    form: CacheFormat, rows: Tensor, global_scale: float | None = None
) -> Tensor:
    """Return what keys or values stand for after they were codes, in float64 on the host.

    Args:
        form: a format whose scales are measured.
        rows: [..., kv_heads, elements].
        global_scale: Optional. Of a format with block scales. If None, there is none.
    """
    return decode_by_hand(form, *encode_by_hand(form, rows, global_scale), global_scale)


def end_of(request: Any) -> int:
    """Return the tokens of a scheduled request's sequence after the step."""
    end: int = request.num_computed_tokens + request.num_scheduled_tokens
    return end
