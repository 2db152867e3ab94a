"""Sparse attention: each query attends to the cache slots that it names.

Paged attention reads a sequence through its row of the block table. An entry is a block, and all of
its slots are keys. With blocks of one slot an entry is a slot, and a row may name any keys in any
order. If each query is a request with a row of its own, the row is the selection of the query. So
sparse attention is paged attention with blocks of one.

A model selects positions in the sequence of a request. `convert_req_index_to_global_index` looks up
the slot of each position, as a cache write does. The entry -1 names no key. It may be anywhere in a
row, and a row may consist of it. Each other entry counts: a slot that is named twice is two keys.
"""

import torch

from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.kinds import PAD_SLOT_ID
from ...contract.latent_formats import find_record_heads
from ...contract.shapes import (
    BlockTable,
    KeyCache,
    LogSumExp,
    Output,
    Query,
    Selected,
    TokenRequests,
    ValueCache,
)
from ...validation import validated
from ...validation.sparse import check_convert_indices, check_sparse_attention
from ..attention.heads import repeat_heads
from ..attention.output import start_output, write_output
from ..attention.requests.request import RequestView
from ..attention.scores import modify_scores
from ..attention.softmax import softmax
from ..cache.formats import load_slots
from ..cache.latent_formats import load_latents


@validated(check_convert_indices)
def convert_req_index_to_global_index(
    req_id: TokenRequests,
    block_table: BlockTable,
    token_indices: Selected,
    block_size: int,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    dcp_kv_cache_interleave_size: int = 1,
    compact_valid_to_front: bool = False,
) -> tuple[Selected, TokenRequests]:
    """Return the cache slots of the keys that each token selected, and how many it has.

    Args:
        req_id: [tokens] int32 request of each token; negative for padding, which selects nothing.
        block_table: [reqs, max_blocks] block ids in sequence order.
        token_indices: [tokens, selected] int32 positions in the sequence of the token's request.
            Negative entries select nothing, and so do positions past the end of the block table.
        block_size: Slots per block.
        dcp_world_size, dcp_rank, dcp_kv_cache_interleave_size: With decode context parallelism,
            ranks take turns to store this many tokens. The others' tokens have no slot here.
        compact_valid_to_front: Whether the slots of a token are moved to the front of its row.
            They keep their order.

    Returns:
        [tokens, selected] int32 slots, -1 where there is none; and [tokens] int32 slots of each
        token.

    Raises:
        IndexError: A request is not in the block table, or an entry that is read is not a block id.
        ValueError: Shapes or devices do not match, or a number is out of range.
        TypeError: A tensor is not int32.

    Source:
        vLLM's `triton_convert_req_index_to_global_index` and `triton_filter_and_convert_dcp_index`
        (0.33).

    Example:
        Blocks of 4: position 5 has offset 1 in entry 1 of the row, block 2, so its slot is 9.
        Position 8 is past the end of the row.

        >>> slots, count = convert_req_index_to_global_index(
        ...     req_id=torch.tensor([0], dtype=torch.int32),
        ...     block_table=torch.tensor([[7, 2]], dtype=torch.int32),
        ...     token_indices=torch.tensor([[5, -1, 0, 8]], dtype=torch.int32),
        ...     block_size=4,
        ...     compact_valid_to_front=True,
        ... )
        >>> slots.tolist(), count.tolist()
        ([[9, 28, -1, -1]], [2])
    """
    slots = torch.full_like(token_indices, PAD_SLOT_ID)
    count = torch.zeros_like(req_id)
    owners, positions = req_id.tolist(), token_indices.tolist()
    rows, reach = block_table.tolist(), block_table.shape[1] * block_size
    for token, owner in enumerate(owners):
        for column, position in enumerate(positions[token]):
            # step: find the rank of the position, and its position there
            turn, offset = divmod(position, dcp_kv_cache_interleave_size)
            local = turn // dcp_world_size * dcp_kv_cache_interleave_size + offset
            is_here = turn % dcp_world_size == dcp_rank
            # step: skip what has no slot
            if owner < 0 or position < 0 or not is_here or local >= reach:
                continue
            # step: look up the slot in the request's row
            block_id = rows[owner][local // block_size]
            target = int(count[token]) if compact_valid_to_front else column
            slots[token, target] = block_id * block_size + local % block_size
            count[token] += 1
    return slots, count


@validated(check_sparse_attention)
def sparse_attention(
    query: Query,
    key_cache: KeyCache,
    value_cache: ValueCache,
    slots: Selected,
    scale: float | None = None,
    out: Output | None = None,
    lse: LogSumExp | None = None,
    compute_dtype: torch.dtype = torch.float32,
    options: AttentionOptions = DEFAULT_OPTIONS,
    req_id: TokenRequests | None = None,
    block_table: BlockTable | None = None,
) -> Output:
    """Return attention of each token over the cache slots that its row names.

    Nothing says where a key is in its sequence, so no key is masked: the selection of a causal
    model names no later key. Latents (MLA) are keys with one head, whose first elements are the
    values: `kv_cache[:, :, None]` and `kv_cache[:, :, None, :kv_lora_rank]`. Of a cache that
    stores latents as records of bytes, `kv_cache[:, :, None]` is both keys and values.

    Args:
        query: [tokens, query_heads, head_size]. `query_heads` is a multiple of `kv_heads`; query
            head h reads kv head h * kv_heads // query_heads.
        key_cache: [num_blocks, block_size, kv_heads, head_size] in a floating dtype or FP8; or
            records, [num_blocks, block_size, 1, record_bytes] uint8.
        value_cache: [num_blocks, block_size, kv_heads, value_head_size]; or `key_cache` itself, if
            it has records.
        slots: [tokens, selected] int32. Slot s is offset s % block_size of block s // block_size;
            -1 names no key. Each entry counts: a slot that is named twice is two keys.
        scale: Factor of the dot products. If None, 1 / sqrt(head_size).
        out: Optional. [tokens, query_heads, value_head_size], modified in place. If None, a new
            tensor in the dtype of `query` is returned.
        lse: Optional. [query_heads, tokens] float32 or float64, modified in place: the natural
            log-sum-exp of each query's scores.
        compute_dtype: The dtype of all arithmetic.
        options: `logits_soft_cap`, `sinks`, `k_scale` and `v_scale` (one number, or [kv_heads]),
            `out_scale`, `batch_invariant`. With records none.
        req_id: Optional. [tokens] int32 request of each token; negative for padding. It is
            validated only, together with `block_table`.
        block_table: Optional. [reqs, max_blocks]. Where contents are validated, a slot outside the
            blocks of its token's request is rejected. If None, slots of any block are taken.

    Returns:
        `out`. A token that names no slot gets 0 and the log-sum-exp -inf, or that of its sink.

    Raises:
        NotImplementedError: Another option is given, or the cache has another format.
        IndexError: A slot is outside the cache, or belongs to another request.
        ValueError: Shapes do not match, heads do not divide, or an option is out of range.
        TypeError: A dtype is not the expected one.

    Source:
        DeepSeek-V3.2, 2025 (DeepSeek Sparse Attention).

    Example:
        All keys are equal, and values are 0 to 3. Token 0 names slots 3 and 0, token 1 names none.

        >>> sparse_attention(
        ...     query=torch.ones(2, 1, 1),
        ...     key_cache=torch.ones(2, 2, 1, 1),
        ...     value_cache=torch.arange(4.0).view(2, 2, 1, 1),
        ...     slots=torch.tensor([[3, -1, 0], [-1, -1, -1]], dtype=torch.int32),
        ... ).flatten()
        tensor([1.5000, 0.0000])
    """
    query_heads, block_size = query.shape[1], key_cache.shape[1]
    scale = query.shape[2] ** -0.5 if scale is None else scale
    form = find_record_heads(key_cache, value_cache)
    value_size = value_cache.shape[3] if form is None else form.kv_lora_rank
    out = start_output(query, value_size, out, lse)
    for token, row in enumerate(slots.long()):
        # step: leave out the entries without a slot
        named = row[row >= 0]
        # step: gather the keys and values of the slots
        block, offset = named // block_size, named % block_size
        if form is None:
            k = load_slots(key_cache, block, offset, compute_dtype, options.k_scale)
            v = load_slots(value_cache, block, offset, compute_dtype, options.v_scale)
        else:
            # a latent and its rope key are the key, and the latent is the value
            k = load_latents(key_cache[:, :, 0], block, offset, None, compute_dtype)[
                :, None
            ]
            v = k[..., :value_size]
        k, v = repeat_heads(k, query_heads), repeat_heads(v, query_heads)
        # step: compute the scaled dot products of the query and the keys
        q = query[token, None].to(compute_dtype)  # [1, query_heads, head_size]
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        # the options that are taken read no position, and a slot has none
        none, rows = named[:0], slice(token, token + 1)
        request = RequestView(token, rows, named, none, none, tree=None)
        scores = modify_scores(scores, request, options)
        # step: turn scores into weights (softmax)
        weights, row_lse = softmax(scores, options.sinks)
        # step: average the values by the weights
        result = torch.einsum("hqk,khd->qhd", weights, v)
        write_output(result, row_lse, out, lse, request, options)
    return out
