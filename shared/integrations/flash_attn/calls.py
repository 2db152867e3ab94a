"""The three functions of flash-attn, computed by a twin. No key, value or table is copied.

flash-attn takes dense batches [batch, tokens, heads, head_size], packed ones with cumulative
lengths, and caches with or without a block table. Here all of them are two operations:
`encoder_attention` for keys that follow each other in memory, and `paged_attention` for the others.
A cache without a block table is one with a block per sequence.
"""

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as count_modes

from ...contract.attention_options import AttentionOptions
from ...contract.operations import Implementation
from ...engine.kept_memory import make_kept
from ...validation.flash_attn import (
    check_axes,
    check_cache_call,
    check_call_on_pages,
    check_key_count,
    check_lengths,
    check_no_dropout,
    check_others,
    check_own_rows,
    check_query_starts,
    check_same_sizes,
    check_slopes,
    check_tables,
    read_window,
)
from ...validation.integrations import load_named

Window = tuple[int | None, int | None]
"""Keys before and after a query's own position. -1 or None: all."""
Result = Tensor | tuple[Tensor, Tensor]
BOTH_SIDES: Window = (-1, -1)


class FlashAttention:
    """The functions of flash-attn on one twin.

    Args:
        implementation: "reference", "optimized", or the dotted name of a package with the same
            operations. It is loaded by the first call.
    """

    def __init__(self, implementation: str) -> None:
        """Keep the name."""
        self.implementation = implementation

    @cached_property
    def twin(self) -> Implementation:
        """The twin's operations."""
        return load_named(self.implementation)

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = BOTH_SIDES,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        s_aux: Tensor | None = None,
        return_softmax_lse: bool = False,
        **others: Any,
    ) -> Result:
        """Return attention of a dense batch.

        Args:
            q: [batch, queries, query_heads, head_size]. The queries of a causal call are at the end
                of the keys.
            k: [batch, keys, kv_heads, head_size], any strides.
            v: [batch, keys, kv_heads, value_head_size], any strides.
            dropout_p: Has to be 0.
            softmax_scale: Factor of the scores. If None, 1 / sqrt(head_size).
            causal: Whether a query attends only to keys up to its own position.
            window_size: Keys before and after a query that it attends to. Equal numbers, or a
                causal window.
            softcap: Cap of the scores. 0: none.
            alibi_slopes: Optional. [query_heads] float32, for causal calls.
            deterministic: Every call is deterministic.
            return_attn_probs: Has to be False.
            s_aux: Optional. [query_heads], the sinks.
            return_softmax_lse: Whether the log-sum-exp [batch, query_heads, queries] float32 is
                returned too.
            others: Further arguments of flash-attn. Hints are ignored.

        Returns:
            [batch, queries, query_heads, value_head_size], or a pair of it and the log-sum-exp.

        Raises:
            NotImplementedError: An argument asks for what no twin computes.

        Source:
            `flash_attn_func` of flash-attn 2.8.3; `s_aux` of its third version.
        """
        check_axes(4, q=q, k=k, v=v)
        check_same_sizes("batch", q=q, k=k)
        check_same_sizes("batch keys", k=k, v=v)
        check_no_dropout(dropout_p, return_attn_probs)
        check_others("flash_attn_func", others)
        options = _options(causal, window_size, softcap, alibi_slopes, s_aux)
        batch, key_len = k.shape[:2]

        def attend(lse: Tensor | None) -> Tensor:
            query_len = q.shape[1]
            query_starts = _starts(batch, query_len, q.device)
            if _is_packed(k) and _is_packed(v):
                out: Tensor = self.twin.encoder_attention(
                    q.flatten(0, 1),
                    k.flatten(0, 1),
                    v.flatten(0, 1),
                    query_starts,
                    _starts(batch, key_len, q.device),
                    query_len,
                    key_len,
                    softmax_scale,
                    lse=lse,
                    options=options,
                )
                return out
            # each sequence is a block of its own
            return self._attend_pages(
                q.flatten(0, 1),
                k,
                v,
                _rows(batch, q.device),
                query_starts,
                _filled(batch, key_len, q.device),
                query_len,
                softmax_scale,
                lse,
                options,
            )

        return _dense(q, attend, return_softmax_lse)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int = 0,
        max_seqlen_k: int = 0,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = BOTH_SIDES,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
        s_aux: Tensor | None = None,
        seqused_k: Tensor | None = None,
        page_table: Tensor | None = None,
        out: Tensor | None = None,
        return_softmax_lse: bool = False,
        **others: Any,
    ) -> Result:
        """Return attention of a packed batch, over packed keys or a paged cache.

        Args:
            q: [tokens, query_heads, head_size], request after request.
            k: [key_tokens, kv_heads, head_size], or with a block table
                [num_blocks, block_size, kv_heads, head_size].
            v: As `k`, with value_head_size.
            cu_seqlens_q: [reqs + 1] int32, the start of each request's queries.
            cu_seqlens_k: [reqs + 1] int32, the start of each request's keys. With a block table its
                differences are the numbers of keys.
            max_seqlen_q, max_seqlen_k: At least the queries and keys of every request.
            block_table, page_table: Optional. [reqs, max_blocks] int32. One of the two names.
            seqused_k: Optional. [reqs] int32, the keys of each request, instead of `cu_seqlens_k`.
                It needs a block table.
            out: Optional. The result's tensor, modified in place.
            dropout_p, softmax_scale, causal, window_size, softcap: As in `flash_attn_func`.
            alibi_slopes, deterministic, return_attn_probs, s_aux, others: As there.
            return_softmax_lse: Whether the log-sum-exp [query_heads, tokens] float32 is returned
                too.

        Returns:
            [tokens, query_heads, value_head_size], or a pair of it and the log-sum-exp.

        Raises:
            NotImplementedError: An argument asks for what no twin computes.
            ValueError: The lengths of the keys, or both tables, are not given as described.

        Source:
            `flash_attn_varlen_func` of flash-attn 2.8.3; `seqused_k`, `page_table`, `s_aux` and
            `out` of its third version and of vLLM's copy.
        """
        check_no_dropout(dropout_p, return_attn_probs)
        check_others("flash_attn_varlen_func", others)
        check_axes(3, q=q)
        table = check_tables(block_table, page_table)
        check_lengths(table, cu_seqlens_k, seqused_k)
        options = _options(causal, window_size, softcap, alibi_slopes, s_aux)
        lse = _lse(q.shape[1], q.shape[0], q.device) if return_softmax_lse else None
        if table is None:
            found = self.twin.encoder_attention(
                q,
                k,
                v,
                cu_seqlens_q,
                cu_seqlens_k,
                int(max_seqlen_q),
                int(max_seqlen_k),
                softmax_scale,
                out=out,
                lse=lse,
                options=options,
            )
        else:
            seq_lens = seqused_k
            if seq_lens is None:
                assert cu_seqlens_k is not None
                seq_lens = cu_seqlens_k.diff()
            found = self._attend_pages(
                q,
                k,
                v,
                table,
                cu_seqlens_q,
                seq_lens,
                int(max_seqlen_q),
                softmax_scale,
                lse,
                options,
                out,
                int(max_seqlen_k),
            )
        return found if lse is None else (found, lse)

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: int | Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = BOTH_SIDES,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
        s_aux: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None,
        **others: Any,
    ) -> Result:
        """Store new keys and values in a cache, if any are given, and return attention over it.

        A call that raises has stored nothing.

        Args:
            q: [batch, queries, query_heads, head_size], or with `cu_seqlens_q`
                [tokens, query_heads, head_size].
            k_cache: [num_blocks, block_size, kv_heads, head_size] with a block table, otherwise
                [cache_batch, max_keys, kv_heads, head_size]. Modified in place.
            v_cache: As `k_cache`, with value_head_size. Modified in place.
            k, v: Optional. [batch, new_tokens, kv_heads, ...], stored after the keys of the cache.
            rotary_cos, rotary_sin, rotary_interleaved: The rotation has to be applied before.
            cache_seqlens: Keys in the cache before the call: one number, or [batch] int32. If None,
                the cache is full.
            cache_batch_idx: Optional. [batch] int32, the sequence of the cache of each query.
            cache_leftpad: Has to be None.
            block_table, page_table: Optional. [batch, max_blocks] int32. One of the two names.
            num_splits: A hint, which is ignored.
            cu_seqlens_q, max_seqlen_q: Optional. [batch + 1] int32, the start of each request's
                queries, and at least the queries of every request. Nothing is stored then.
            softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, others: As in
                `flash_attn_func`.
            return_softmax_lse: Whether the log-sum-exp [batch, query_heads, queries] float32 is
                returned too.

        Returns:
            [batch, queries, query_heads, value_head_size], or a pair of it and the log-sum-exp.
            With `cu_seqlens_q`, of [tokens, ...] and [query_heads, tokens].

        Raises:
            NotImplementedError: An argument asks for what no twin computes.
            ValueError: Both tables, or only one of `k` and `v`, are given, sizes disagree, a number
                of keys does not fit the cache, or as in `paged_attention`.
            IndexError, TypeError: As in `paged_attention`.

        Source:
            `flash_attn_with_kvcache` of flash-attn 2.8.3; `page_table` and `s_aux` of its third
            version.
        """
        check_axes(4, k_cache=k_cache, v_cache=v_cache)
        check_axes(4 if cu_seqlens_q is None else 3, q=q)
        check_others("flash_attn_with_kvcache", others)
        check_cache_call(k, v, rotary_cos, rotary_sin, cache_leftpad, cache_seqlens)
        check_query_starts(cu_seqlens_q, max_seqlen_q, k)
        table = check_tables(block_table, page_table, cache_batch_idx)
        options = _options(causal, window_size, softcap, alibi_slopes, s_aux)
        if cu_seqlens_q is None:
            batch, query_len = q.shape[:2]
            query_starts = _starts(batch, query_len, q.device)
        else:
            assert max_seqlen_q is not None
            batch, query_len = len(cu_seqlens_q) - 1, int(max_seqlen_q)
            query_starts = cu_seqlens_q
        block_size = k_cache.shape[1]
        if table is None and cache_batch_idx is not None:
            table = cache_batch_idx.to(torch.int32)[:, None]
        elif table is None:
            check_own_rows(batch, len(k_cache))
            table = _rows(batch, q.device)
        max_seq_len = table.shape[1] * block_size
        if isinstance(cache_seqlens, Tensor):
            seq_lens = cache_seqlens
        else:
            count = max_seq_len if cache_seqlens is None else cache_seqlens
            check_key_count(count, 0 if k is None else k.shape[1], max_seq_len)
            seq_lens = _filled(batch, count, q.device)
        flat = q.flatten(0, 1) if cu_seqlens_q is None else q
        if k is not None and v is not None:
            check_axes(4, k=k, v=v)
            check_same_sizes("batch", q=q, k=k)
            check_same_sizes("batch keys", k=k, v=v)
            new = k.shape[1]
            held, seq_lens = seq_lens, seq_lens + new
            # everything that attention rejects is rejected before the cache changes
            check_call_on_pages(
                flat,
                k_cache,
                v_cache,
                table,
                query_starts,
                seq_lens,
                query_len,
                max_seq_len,
                softmax_scale,
                options,
            )
            slots = self.twin.compute_slot_mapping_device(
                _starts(batch, new, q.device), held, table, block_size, batch * new
            )
            self.twin.reshape_and_cache(
                k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots
            )

        def attend(lse: Tensor | None) -> Tensor:
            return self._attend_pages(
                flat,
                k_cache,
                v_cache,
                table,
                query_starts,
                seq_lens,
                query_len,
                softmax_scale,
                lse,
                options,
                max_seq_len=max_seq_len,
            )

        if cu_seqlens_q is None:
            return _dense(q, attend, return_softmax_lse)
        lse = _lse(q.shape[1], len(q), q.device) if return_softmax_lse else None
        found = attend(lse)
        return found if lse is None else (found, lse)

    def _attend_pages(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        query_len: int,
        scale: float | None,
        lse: Tensor | None,
        options: AttentionOptions,
        out: Tensor | None = None,
        max_seq_len: int | None = None,
    ) -> Tensor:
        """Return attention over a paged cache; by default a request has at most all its blocks."""
        if max_seq_len is None:
            max_seq_len = table.shape[1] * k_cache.shape[1]
        found: Tensor = self.twin.paged_attention(
            q,
            k_cache,
            v_cache,
            table,
            query_starts,
            seq_lens,
            query_len,
            max_seq_len,
            scale,
            out=out,
            lse=lse,
            options=options,
        )
        return found


def _dense(
    q: Tensor, attend: Callable[[Tensor | None], Tensor], has_lse: bool
) -> Result:
    """Return what `attend` computes from flat queries, in the shape of a dense batch."""
    batch, query_len, heads = q.shape[:3]
    lse = _lse(heads, batch * query_len, q.device) if has_lse else None
    found = attend(lse)
    out = found.view(batch, query_len, *found.shape[1:])
    if lse is None:
        return out
    return out, lse.view(heads, batch, query_len).transpose(0, 1)


def _options(
    causal: bool,
    window_size: Window,
    softcap: float,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> AttentionOptions:
    is_causal, window = read_window(causal, window_size)
    check_slopes(slopes, is_causal)
    if slopes is None and sinks is None:
        return _plain_options(is_causal, window, float(softcap))
    return AttentionOptions(
        causal=is_causal,
        sliding_window=window,
        logits_soft_cap=softcap or None,
        alibi_slopes=slopes,
        sinks=None if sinks is None else sinks.float(),
    )


@lru_cache(maxsize=256)
def _plain_options(
    causal: bool, window: int | None, softcap: float
) -> AttentionOptions:
    """Return options without tensors: one object per kind of call, as a layer passes."""
    return AttentionOptions(
        causal=causal, sliding_window=window, logits_soft_cap=softcap or None
    )


def _is_packed(tensor: Tensor) -> bool:
    """Return whether the sequences of a dense batch follow each other in memory."""
    return tensor.shape[0] == 1 or (
        tensor.stride(0) == tensor.shape[1] * tensor.stride(1)
    )


def _lse(heads: int, tokens: int, device: torch.device) -> Tensor:
    return torch.empty(heads, tokens, dtype=torch.float32, device=device)


# constants that only sizes determine; they are never modified


def _starts(batch: int, length: int, device: torch.device) -> Tensor:
    """Return where each sequence of a dense batch starts, and where the last one ends."""
    return _constant("starts", batch, length, device)


def _rows(batch: int, device: torch.device) -> Tensor:
    """Return a block table in which sequence i has block i alone."""
    return _constant("rows", batch, 1, device)


def _filled(batch: int, length: int, device: torch.device) -> Tensor:
    """Return equal lengths of all sequences."""
    return _constant("filled", batch, length, device)


def _make(kind: str, batch: int, length: int, device: torch.device) -> Tensor:
    if kind == "filled":
        return torch.full((batch,), length, dtype=torch.int32, device=device)
    if kind == "rows":
        return torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


@lru_cache(maxsize=256)
def _kept(kind: str, batch: int, length: int, device: torch.device) -> Tensor:
    return make_kept(lambda: (_make(kind, batch, length, device),), device)[0]


def _constant(kind: str, batch: int, length: int, device: torch.device) -> Tensor:
    # each replay writes what its capture made, and a traced call makes tensors without elements:
    # other calls cannot use them
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if is_captured or count_modes():
        return _make(kind, batch, length, device)
    return _kept(kind, batch, length, device)
