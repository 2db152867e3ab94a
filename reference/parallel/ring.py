"""Ring prefill: keys and values pass from rank to rank, and results of rounds are merged.

Ranks compute chunks of each prompt in zig-zag order (prefill.py). There every rank gathers the keys
of all ranks before it attends. Here a rank holds the share of one rank at a time. In each round it
attends to the share that it holds, while this share goes to the next rank and that of the previous
rank arrives. After as many rounds as ranks it has attended to all shares. So a rank needs memory
for two shares, whatever the number of ranks, and the exchange overlaps with the arithmetic.

A rank holds its own share first. Of a share of a rank before it, both of its chunks attend to the
first chunk. Of a share of a rank after it, only its second chunk attends to keys, and to both
chunks. Half of the pairs of chunks are not computed, and each rank has the same work in each round.

A row is the merge of one partial result per round, in float32 and in the order of the rounds. So
results differ in their last bits from those of one rank.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...contract.argument_types import typed
from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.parallel import RingShare
from ...contract.shapes import Key, LogSumExp, Output, Query, Value
from ...engine.rank_agreement import agree_on_rows
from ...validation.parallel import check_ring_tokens
from ..attention.merge_states import merge_attn_states
from ..attention.paged import paged_attention
from ..cache.cache_ops import reshape_and_cache
from ..parallel.prompt_ranks import PromptRanks
from ..parallel.ring_rounds import list_rounds


@typed
class RingContextParallel(PromptRanks):
    """Attention of one rank's chunks of the prompts of a step, over shares that go round a ring.

    All ranks make the same calls in the same order, with the same prompts.

    Args:
        ranks: The group.
        block_size: Slots in a block of a share.
        device: Of the tokens.

    Raises:
        ValueError: `block_size` is below 1.
        RankError: The ranks do not agree on the block size.

    Source:
        Liu et al., "Ring Attention with Blockwise Transformers", ICLR 2024; chunks in zig-zag
        order as in Llama 3, section 3.3.2, 2024.

    Example:
        One rank has both chunks of a prompt of three tokens, and one round.

        >>> ring = RingContextParallel(RankGroup(), block_size=2)
        >>> share = ring.prepare([3])
        >>> share.tokens, [ring_round.seq_lens.tolist() for ring_round in share.rounds]
        (tensor([0, 1, 2]), [[1, 3]])
        >>> ones, values = torch.ones(3, 1, 1), torch.tensor([3.0, 5.0, 7.0])
        >>> ring.attend(ones, ones, values.view(3, 1, 1), share).flatten()
        tensor([3., 4., 5.])
    """

    def prepare(self, query_lens: Sequence[int]) -> RingShare:
        """Return the chunks that this rank computes, once per step, for all layers.

        Args:
            query_lens: Tokens of each prompt. All of them are new.

        Returns:
            The indices of this rank's tokens, and the keys of each round. Two requests per prompt.

        Raises:
            ValueError: A length is negative.
            RankError: The ranks do not agree on the prompts.
        """
        self._begin_step(query_lens)
        # step: cut each prompt into two chunks per rank, and list the keys of each round
        return list_rounds(
            query_lens,
            self.ranks.world_size,
            self.ranks.rank,
            self.block_size,
            self.device,
        )

    def attend(
        self,
        query: Query,
        key: Key,
        value: Value,
        share: RingShare,
        scale: float | None = None,
        out: Output | None = None,
        lse: LogSumExp | None = None,
        options: AttentionOptions = DEFAULT_OPTIONS,
    ) -> Output:
        """Return attention of this rank's tokens over the prompts up to their positions.

        Args:
            query: [tokens, query_heads, head_size] of the tokens `share.tokens`, in that order.
            key: [tokens, kv_heads, head_size] of the same tokens.
            value: [tokens, kv_heads, value_head_size].
            share: That of `prepare`.
            scale: Factor of the dot products. If None, 1 / sqrt(head_size).
            out: Optional. [tokens, query_heads, value_head_size], modified in place. If None, a
                new tensor in the dtype of `query` is returned.
            lse: Optional. [query_heads, tokens], modified in place.
            options: `logits_soft_cap` and `sinks`.

        Returns:
            `out`.

        Raises:
            NotImplementedError: An option depends on positions, which the keys of a round do not
                have. `PrefillContextParallel` takes it.
            ValueError: Shapes do not match, or `batch_invariant`: the bits of a row depend on the
                number of ranks.
            RankError: Another rank has ended or does not answer.
        """
        check_ring_tokens(query, key, value, share, out, lse, options)
        agree_on_rows(self.ranks, key, value)
        tokens, heads, size = query.shape
        # step: put this rank's keys and values into blocks
        blocks = (share.num_blocks, self.block_size, key.shape[1])
        held = key.new_zeros(*blocks, size + value.shape[-1])
        reshape_and_cache(key, value, held[..., :size], held[..., size:], share.slots)
        dtype = torch.promote_types(query.dtype, torch.float32)
        total = query.new_zeros(tokens, heads, value.shape[-1], dtype=dtype)
        total_lse = total.new_full((heads, tokens), -torch.inf)
        for current in share.rounds:
            is_last = current is share.rounds[-1]
            if not is_last:
                # step: start to send the held share to the next rank
                arrived = self.ranks.start_shift(held, torch.empty_like(held))
            if current.max_seq_len:
                # step: attend to the keys of the held share that precede each chunk
                partial, partial_lse = (
                    torch.empty_like(of) for of in (total, total_lse)
                )
                paged_attention(
                    query,
                    held[..., :size],
                    held[..., size:],
                    current.block_table,
                    share.query_start_loc,
                    current.seq_lens,
                    share.max_query_len,
                    current.max_seq_len,
                    scale=scale,
                    out=partial,
                    lse=partial_lse,
                    compute_dtype=dtype,
                    options=replace(options, causal=current.causal, sinks=None),
                )
                # step: merge them with the results of the rounds before
                merge_attn_states(
                    total, total_lse, partial, partial_lse,
                    output=total, output_lse=total_lse,
                )  # fmt: skip
            if not is_last:
                # step: wait for the share of the previous rank
                held = arrived()
        # step: count the sinks once, after all keys
        if options.sinks is not None:
            sinks = options.sinks.to(dtype)[:, None].expand(heads, tokens)
            merge_attn_states(
                total, total_lse, torch.zeros_like(total), sinks,
                output=total, output_lse=total_lse,
            )  # fmt: skip
        out = query.new_empty(total.shape) if out is None else out
        if lse is not None:
            lse.copy_(total_lse)
        return out.copy_(total)
