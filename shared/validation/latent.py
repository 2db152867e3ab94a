"""Validation of latent attention: model configurations and calls."""

from typing import Any

import torch
from torch import Tensor

from ..contract.attention_options import OPTION_NAMES, AttentionOptions
from .attention import check_bound
from .attention_options import check_positions, reject_options
from .batch import check_block_ids, check_block_table, check_start_loc
from .latent_cache import check_latent_cache, check_latent_width, dtypes_of_numbers
from .memory import check_own_memory
from .options.sliding_window import validate as check_window
from .primitives import (
    check_dtype,
    check_length,
    check_not_negative,
    check_positive,
    check_same_device,
)
from .results import check_results
from .score_numbers import check_score_scale


def check_mla_config(hf_text_config: Any) -> None:
    """Reject the configuration of a model without latent attention."""
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        if getattr(hf_text_config, name, None) is None:
            raise ValueError(
                f"hf_text_config has no {name}: expected the configuration of a model"
                " with multi-head latent attention"
            )


def check_concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    scale: Tensor | float | None,
    contents: bool,
) -> None:
    """Reject a write that does not fit the latent cache, before anything is written."""
    check_latent_cache(kv_cache, "scale", scale, contents)
    check_dtype("kv_c", kv_c, *dtypes_of_numbers(kv_cache))
    check_dtype("k_pe", k_pe, kv_c.dtype)
    _check_new_tokens(kv_c, k_pe)
    check_latent_width(kv_cache, kv_c.shape[1], k_pe.shape[1])
    check_same_device(
        kv_cache=kv_cache, kv_c=kv_c, k_pe=k_pe, slot_mapping=slot_mapping
    )
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    tokens = kv_c.shape[0]
    if slot_mapping.dim() != 1 or slot_mapping.shape[0] > tokens:
        raise ValueError(
            f"slot_mapping has shape {list(slot_mapping.shape)}: expected at most"
            f" [{tokens}], the tokens of kv_c and k_pe"
        )
    check_own_memory(kv_cache=kv_cache)
    if contents:
        num_slots = kv_cache.shape[0] * kv_cache.shape[1]
        check_slots(slot_mapping.tolist(), num_slots)


def check_latent_decode_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    out: Tensor | None,
    lse: Tensor | None,
    options: AttentionOptions,
    contents: bool,
    scale: float | None = None,
) -> None:
    """Validate the arguments of latent decode attention."""
    _check_options(options)
    check_latent_cache(kv_cache, "k_scale", options.k_scale, contents)
    check_dtype("q_nope", q_nope, *dtypes_of_numbers(kv_cache))
    _check_heads(q_nope, q_pe, kv_cache, w_uk, w_uv, out, lse)
    check_latent_width(kv_cache, w_uk.shape[2], q_pe.shape[2])
    check_score_scale(scale)
    if options.sliding_window is not None:
        check_window(options.sliding_window)
    _check_batch(
        q_nope,
        kv_cache,
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        max_seq_len,
        contents,
    )


def check_latent_prefill_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    num_context_tokens: int,
    max_context_chunk: int | None,
    out: Tensor | None,
    lse: Tensor | None,
    options: AttentionOptions,
    contents: bool,
    scale: float | None = None,
) -> None:
    """Validate the arguments of latent prefill attention."""
    reject_options(
        options,
        ("sliding_window",),
        "every chunk of the context is fully visible; latent_decode_attention takes it",
    )
    check_score_scale(scale)
    check_latent_decode_attention(
        q_nope,
        q_pe,
        kv_cache,
        w_uk,
        w_uv,
        block_table,
        query_start_loc,
        seq_lens,
        max_query_len,
        max_seq_len,
        out,
        lse,
        options,
        contents,
    )
    check_dtype("kv_c", kv_c, q_nope.dtype)
    check_dtype("k_pe", k_pe, q_nope.dtype)
    _check_new_tokens(kv_c, k_pe)
    tokens, rank, rope = q_nope.shape[0], w_uk.shape[2], q_pe.shape[2]
    for name, tensor, width in (("kv_c", kv_c, rank), ("k_pe", k_pe, rope)):
        if tuple(tensor.shape) != (tokens, width):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: expected [{tokens}, {width}], as"
                " many tokens as queries"
            )
    check_same_device(q_nope=q_nope, kv_c=kv_c, k_pe=k_pe)
    check_results(out, lse, {"kv_c": kv_c, "k_pe": k_pe})
    check_not_negative(num_context_tokens=num_context_tokens)
    if max_context_chunk is not None:
        check_positive(max_context_chunk=max_context_chunk)
    if contents:
        context = int((seq_lens - query_start_loc.diff()).sum())
        if context > num_context_tokens:
            raise ValueError(
                f"num_context_tokens = {num_context_tokens}: expected at least {context},"
                " the tokens that all requests have in the cache before their new ones"
            )


def _check_options(options: AttentionOptions) -> None:
    """Reject options that attention over latents does not take."""
    if options.with_causal(True).causal is not True:
        reject_options(options, ("causal",), "attention over latents is causal")
    taken = ("causal", "sliding_window", "k_scale")
    others = [name for name in OPTION_NAMES if name not in taken]
    reject_options(
        options, others, "attention over latents takes sliding_window and k_scale only"
    )


def check_slots(slots: list[int], num_slots: int) -> None:
    """Reject slots outside the cache, and a slot that is assigned to two tokens."""
    owner: dict[int, int] = {}
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        if slot >= num_slots:
            raise IndexError(
                f"slot_mapping[{token}] = {slot} is outside the cache: expected -1 (do not"
                f" store) or 0 <= slot < {num_slots}"
            )
        if slot in owner:
            raise ValueError(
                f"slot_mapping[{token}] = {slot} is also slot_mapping[{owner[slot]}]:"
                " expected one token a slot, since the order of two writes is not defined"
            )
        owner[slot] = token


def _check_new_tokens(kv_c: Tensor, k_pe: Tensor) -> None:
    if kv_c.dim() != 2 or k_pe.dim() != 2 or kv_c.shape[0] != k_pe.shape[0]:
        raise ValueError(
            f"kv_c has shape {list(kv_c.shape)} and k_pe {list(k_pe.shape)}: expected"
            " [tokens, kv_lora_rank] and [tokens, qk_rope_head_dim]"
        )


def _check_heads(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    """Reject queries, projections and results whose heads or widths differ."""
    for name, tensor in (("q_pe", q_pe), ("w_uk", w_uk), ("w_uv", w_uv)):
        check_dtype(name, tensor, q_nope.dtype)
    if q_nope.dim() != 3 or q_pe.dim() != 3 or q_nope.shape[:2] != q_pe.shape[:2]:
        raise ValueError(
            f"q_nope has shape {list(q_nope.shape)} and q_pe {list(q_pe.shape)}: expected"
            " [tokens, query_heads, qk_nope_head_dim] and [tokens, query_heads,"
            " qk_rope_head_dim]"
        )
    tokens, heads, nope = q_nope.shape
    if w_uk.dim() != 3 or tuple(w_uk.shape[:2]) != (heads, nope):
        raise ValueError(
            f"w_uk has shape {list(w_uk.shape)}: expected [{heads}, {nope}, kv_lora_rank],"
            " heads and width of q_nope"
        )
    rank = w_uk.shape[2]
    if w_uv.dim() != 3 or tuple(w_uv.shape[:2]) != (heads, rank):
        raise ValueError(
            f"w_uv has shape {list(w_uv.shape)}: expected [{heads}, {rank}, v_head_dim],"
            " heads and latent width of w_uk"
        )
    check_positive(
        num_query_heads=heads,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=q_pe.shape[2],
        v_head_dim=w_uv.shape[2],
    )
    expected = (tokens, heads, w_uv.shape[2])
    if out is not None and tuple(out.shape) != expected:
        raise ValueError(
            f"out has shape {list(out.shape)}: expected {list(expected)}, queries by"
            " v_head_dim"
        )
    if lse is not None and tuple(lse.shape) != (heads, tokens):
        raise ValueError(
            f"lse has shape {list(lse.shape)}: expected [{heads}, {tokens}]"
        )
    check_same_device(q_nope=q_nope, q_pe=q_pe, w_uk=w_uk, w_uv=w_uv, out=out, lse=lse)
    read = {"q_nope": q_nope, "q_pe": q_pe, "w_uk": w_uk, "w_uv": w_uv}
    check_results(out, lse, read | {"kv_cache": kv_cache})


def _check_batch(
    q_nope: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    contents: bool,
) -> None:
    """Reject lengths, starts and block ids that are out of range."""
    check_block_table(block_table)
    check_dtype("seq_lens", seq_lens, torch.int32)
    reqs, max_blocks = block_table.shape
    num_blocks, block_size, _ = kv_cache.shape
    check_length("seq_lens", seq_lens, reqs, "rows of the block table")
    check_same_device(
        kv_cache=kv_cache,
        q_nope=q_nope,
        block_table=block_table,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
    )
    check_not_negative(max_query_len=max_query_len, max_seq_len=max_seq_len)
    if max_seq_len > max_blocks * block_size:
        raise IndexError(
            f"max_seq_len = {max_seq_len}: expected at most {max_blocks * block_size}, what"
            f" a row of {max_blocks} blocks of {block_size} holds"
        )
    check_start_loc("query_start_loc", query_start_loc, reqs, q_nope.shape[0], contents)
    if not contents:
        return
    check_block_ids(block_table, seq_lens, block_size, num_blocks)
    query_lens, key_lens = query_start_loc.diff().tolist(), seq_lens.tolist()
    check_positions(AttentionOptions(causal=True), query_lens, key_lens)
    check_bound(
        "max_query_len", max_query_len, query_lens, "request {} has {} new tokens"
    )
    check_bound("max_seq_len", max_seq_len, key_lens, "seq_lens[{}] = {}")
