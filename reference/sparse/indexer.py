"""Indexer: cheap scores of all keys of a sequence, and the positions of the largest ones.

Sparse attention needs to know which keys are worth attending to. The indexer has a small key of its
own for each token, in a cache of its own: FP8 codes and one scale. Its score of a key is the sum of
its heads' dot products, each cut off below 0 and multiplied by a weight that the model computes
per token and head. The keys with the largest scores are selected. Both caches have one block table.

1. `indexer_k_quant_and_cache` writes the new tokens' keys.
2. `index_scores` computes the score of each visible key for each new token.
3. `select_keys` returns the positions of the largest ones, in the order of positions.

`convert_req_index_to_global_index` turns positions into slots, which `sparse_attention` takes.

Source: DeepSeek-V3.2, 2025 (lightning indexer).
"""

import torch

from ...contract.indexer_cache import SMALLEST_SIZE, split_indexer_cache
from ...contract.shapes import (
    BlockTable,
    IndexCache,
    IndexKey,
    IndexQuery,
    IndexScores,
    IndexWeights,
    Selected,
    SlotMapping,
    StartLoc,
    TokenCounts,
)
from ...validation import validated
from ...validation.indexer import (
    check_index_scores,
    check_indexer_write,
    check_select_keys,
)
from ..cache.latent_formats.fp8_ds_mla import (
    ceil_log2,
    decode_e4m3,
    encode_e4m3,
    finite_size,
    power_of_two,
)


@validated(check_indexer_write)
def indexer_k_quant_and_cache(
    k: IndexKey,
    kv_cache: IndexCache,
    slot_mapping: SlotMapping,
    scale_fmt: str | None = None,
) -> None:
    """Write the codes and the scale of each new token's indexer key to its slot.

    NaN does not count for the scale, and its code is NaN. An infinite element counts as the largest
    float32, and its code is 448, or -448.

    Args:
        k: [tokens, index_head_dim], any strides; already rotated.
        kv_cache: [num_blocks, block_size, index_head_dim + 4] uint8, modified in place. A block has
            the codes of all tokens, then the float32 scales of all.
        slot_mapping: [slots] slot of the first `slots` tokens. Tokens with a negative slot, and
            tokens past the end of the mapping, are not stored.
        scale_fmt: "ue8m0" rounds scales up to powers of two. If None, they are not rounded.

    Raises:
        IndexError: A slot is outside the cache.
        ValueError: Shapes, strides or devices do not match, two tokens have one slot, or the format
            of scales is unknown.
        TypeError: A dtype is not the expected one.

    Source:
        vLLM's function of that name (0.33).

    Example:
        The largest size is 7, so the scale is 7 / 448 = 2^-6. The codes mean 448 and -64.

        >>> kv_cache = torch.zeros(1, 2, 8, dtype=torch.uint8)
        >>> indexer_k_quant_and_cache(
        ...     k=torch.tensor([[7.0, -1.0, 0.0, 0.0]]),
        ...     kv_cache=kv_cache,
        ...     slot_mapping=torch.tensor([1]),
        ... )
        >>> kv_cache.flatten()[4:8].view(torch.float8_e4m3fn).tolist()
        [448.0, -64.0, 0.0, 0.0]
        >>> kv_cache.flatten()[12:].view(torch.float32).item()
        0.015625
    """
    codes, scales = split_indexer_cache(kv_cache)
    block_size = kv_cache.shape[1]
    # step: divide the largest size of each key by the largest code
    number = k.float()
    scale = finite_size(number).clamp(min=SMALLEST_SIZE) / torch.full_like(
        number[:, 0], 448.0
    )
    if scale_fmt == "ue8m0":
        scale = power_of_two(ceil_log2(scale))
    code = encode_e4m3(number / scale[:, None])
    for token, slot in enumerate(slot_mapping.tolist()):
        # step: skip tokens without a slot
        if slot < 0:
            continue
        # step: store the codes and the scale
        codes[slot // block_size, slot % block_size] = code[token]
        scales[slot // block_size, slot % block_size] = scale[token]


@validated(check_index_scores)
def index_scores(
    query: IndexQuery,
    weights: IndexWeights,
    kv_cache: IndexCache,
    block_table: BlockTable,
    query_start_loc: StartLoc,
    seq_lens: TokenCounts,
    max_seq_len: int,
) -> IndexScores:
    """Return the indexer's score of each key for each new token.

    The score is key scale * sum over heads of weight * max(query * codes, 0). The new tokens are
    the last ones of their sequence, and a token has no score of later keys.

    Args:
        query: [tokens, index_heads, index_head_dim], request after request, float or FP8 (e4m3).
        weights: [tokens, index_heads] float32. The scales of an FP8 query belong to them.
        kv_cache: [num_blocks, block_size, index_head_dim + 4] uint8, the new tokens' keys included.
        block_table: [reqs, max_blocks]. Entries past the end of a sequence are never read.
        query_start_loc: [reqs + 1] where each request's queries start.
        seq_lens: [reqs] keys of each sequence, the new ones included. The first queries of a
            request with more queries than keys have no key.
        max_seq_len: At least every entry of `seq_lens`.

    Returns:
        [tokens, max_seq_len] float32, by position in the sequence; -inf where a key is missing, and
        in rows past the last request.

    Raises:
        IndexError: A length or a block id is outside the table or the cache.
        ValueError: Shapes, strides or devices do not match, or a sequence exceeds `max_seq_len`.
        TypeError: A dtype is not the expected one.

    Source:
        vLLM's `fp8_paged_mqa_logits` and `fp8_mqa_logits` (0.33); DeepGEMM.

    Example:
        Two keys, 7 and -7 in their first element. The heads' dot products with key 0 are 7 and -7,
        and the second one is cut off; with key 1 it is the first one.

        >>> kv_cache = torch.zeros(1, 2, 8, dtype=torch.uint8)
        >>> k = torch.tensor([[7.0, 0.0, 0.0, 0.0], [-7.0, 0.0, 0.0, 0.0]])
        >>> indexer_k_quant_and_cache(k, kv_cache, slot_mapping=torch.tensor([0, 1]))
        >>> index_scores(
        ...     query=torch.tensor([[[1.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]]]),
        ...     weights=torch.tensor([[1.0, 0.5]]),
        ...     kv_cache=kv_cache,
        ...     block_table=torch.tensor([[0]], dtype=torch.int32),
        ...     query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        ...     seq_lens=torch.tensor([2], dtype=torch.int32),
        ...     max_seq_len=3,
        ... ).tolist()
        [[7.0, 3.5, -inf]]
    """
    codes, scales = split_indexer_cache(kv_cache)
    block_size = kv_cache.shape[1]
    scores = weights.new_full((query.shape[0], max_seq_len), -torch.inf)
    starts = query_start_loc.tolist()
    for req, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[req], starts[req + 1])
        # step: gather the sequence's codes and scales
        position = torch.arange(seq_len, device=query.device)
        block = block_table[req, position // block_size].long()
        offset = position % block_size
        # in float64, so that the order of a sum does not matter
        k = decode_e4m3(codes[block, offset], torch.float64)  # [keys, index_head_dim]
        # step: compute each head's dot products, and cut them off below 0
        products = torch.einsum("qhd,kd->qhk", query[rows].double(), k).relu()
        # step: add them up by weight, and multiply by the scales of the keys
        score = (products * weights[rows, :, None]).sum(1) * scales[block, offset]
        # step: leave out later keys
        own = torch.arange(seq_len - len(score), seq_len, device=query.device)
        is_later = position[None, :] > own[:, None]
        scores[rows, :seq_len] = score.masked_fill(is_later, -torch.inf)
    return scores


@validated(check_select_keys)
def select_keys(scores: IndexScores, topk: int) -> Selected:
    """Return the positions of the largest scores of each token, in the order of positions.

    Of equal scores the lowest positions are selected. Scores of -inf and NaN never are.

    Args:
        scores: [tokens, keys] float32.
        topk: Keys that a token selects at most.

    Returns:
        [tokens, topk] int32, -1 after the last one where a token has fewer keys.

    Raises:
        ValueError: `topk` is below 1, or `scores` has other axes.
        TypeError: `scores` is not float32.

    Source:
        vLLM's `top_k_per_row_prefill` and `top_k_per_row_decode` (0.33), which define no order.

    Example:
        Three keys have the score 5, and two are selected besides 7. Token 1 has one key.

        >>> select_keys(
        ...     scores=torch.tensor(
        ...         [[5.0, 1.0, 5.0, 7.0, 5.0], [2.0, *[-torch.inf] * 4]]
        ...     ),
        ...     topk=3,
        ... )
        tensor([[ 0,  2,  3],
                [ 0, -1, -1]], dtype=torch.int32)
    """
    selected = scores.new_full((scores.shape[0], topk), -1, dtype=torch.int32)
    # step: leave out what has no score
    scores = scores.masked_fill(~(scores > -torch.inf), -torch.inf)
    # step: select the largest scores, and of equal ones the lowest positions
    position = scores.argsort(dim=1, descending=True, stable=True)[:, :topk]
    # step: return them in the order of positions
    missing, past = scores.gather(1, position) == -torch.inf, scores.shape[1]
    position = position.masked_fill(missing, past).sort(dim=1).values
    selected[:, : position.shape[1]] = position.masked_fill(position == past, -1)
    return selected
