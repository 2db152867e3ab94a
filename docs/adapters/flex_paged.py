"""Adapter for PyTorch's FlexAttention.

FlexAttention receives all requests as one sequence: their keys are gathered request by request, and
the mask limits each query to the keys of its own request. Options that change scores are a
`score_mod`; options that mask keys are a part of the mask. Runs on the host, not compiled.
"""

import warnings

import torch
from pagetwin.conformance import Support
from pagetwin.contract.default_modes import default_modes
from torch.nn.attention.flex_attention import AuxRequest, create_mask, flex_attention

warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")

SUPPORT = Support(
    operations=["paged_attention"],
    dtypes=["float32", "float16", "bfloat16"],
    cache_dtypes=["float32", "float16", "bfloat16"],
    options=[
        "scale",
        "out",
        "lse",
        "causal",
        "value_head_size",
        "sliding_window",
        "attention_chunk_size",
        "logits_soft_cap",
        "alibi_slopes",
    ],
    rejects=[],
)


def paged_attention(
    query,  # [tokens, query_heads, head_size]
    key_cache,  # [num_blocks, block_size, kv_heads, head_size]
    value_cache,  # [num_blocks, block_size, kv_heads, value_head_size]
    block_table,  # [reqs, max_blocks]
    query_start_loc,  # [reqs + 1]
    seq_lens,  # [reqs]
    max_query_len,
    max_seq_len,
    scale=None,
    out=None,
    lse=None,  # [query_heads, tokens] natural
    sliding_window=None,
    logits_soft_cap=None,
    alibi_slopes=None,  # [query_heads]
    causal=True,  # or [reqs]
    attention_chunk_size=None,
):
    """Return attention of each new token over its sequence in the paged cache."""
    sizes = (*query.shape[:2], value_cache.shape[-1])
    out = query.new_empty(sizes) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    tokens, keys = int(query_start_loc[-1]), int(seq_lens.sum())
    if not tokens or not keys:
        return out

    # a result does not depend on autocast or on set_float32_matmul_precision, and torch's
    # operations would
    with default_modes():
        # step: gather every sequence's keys and values, one after another
        block_size = key_cache.shape[1]
        blocks = [
            row[: -(-length // block_size)].long()
            for row, length in zip(block_table, seq_lens.tolist(), strict=True)
        ]
        key, value = (
            torch.cat(
                [
                    cache[own].flatten(0, 1)[:length]
                    for own, length in zip(blocks, seq_lens.tolist(), strict=True)
                ]
            )
            for cache in (key_cache, value_cache)
        )  # [keys, kv_heads, head_size]

        # step: find the request and the position of each query and key
        query_lens = query_start_loc.diff()
        reqs = torch.arange(len(seq_lens), device=query.device)
        query_req = reqs.repeat_interleave(query_lens)
        key_req = reqs.repeat_interleave(seq_lens)
        key_start = seq_lens.cumsum(0) - seq_lens
        key_position = torch.arange(keys, device=query.device) - key_start[key_req]
        shift = (seq_lens - query_lens)[query_req] - query_start_loc[:-1][query_req]
        query_position = torch.arange(tokens, device=query.device) + shift
        flags = torch.as_tensor(causal, device=query.device).expand(len(reqs))

        def attends(batch, head, q, kv):
            here, there = query_position[q], key_position[kv]
            seen = query_req[q] == key_req[kv]
            seen = seen & (~flags[query_req[q]] | (there <= here))
            if sliding_window is not None:
                seen = seen & ((here - there).abs() < sliding_window)
            if attention_chunk_size is not None:
                size = attention_chunk_size
                same = here.div(size, rounding_mode="floor") == there.div(
                    size, rounding_mode="floor"
                )
                seen = seen & same
            return seen

        mask = create_mask(attends, 1, 1, tokens, keys, device=query.device)[0, 0]

        def change(score, batch, head, q, kv):
            if logits_soft_cap is not None:
                score = logits_soft_cap * torch.tanh(score / logits_soft_cap)
            if alibi_slopes is not None:
                score = score + alibi_slopes[head] * (
                    key_position[kv] - query_position[q]
                )
            return torch.where(mask[q, kv], score, -torch.inf)

        # step: attend
        result, aux = flex_attention(
            query[:tokens].transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            score_mod=change,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        out[:tokens] = result[0].transpose(0, 1)
        if lse is not None:
            lse[:, :tokens] = aux.lse[0]
    return out
