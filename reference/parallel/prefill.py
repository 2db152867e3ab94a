"""Prefill context parallelism: ranks compute chunks of each prompt in zig-zag order.

A long prompt has more arithmetic than one device should do alone. Each rank computes the queries,
keys and values of some of its tokens. A token attends to all keys up to its own position, so every
rank needs the keys and values of the others: they are gathered. The tokens at the end of a prompt
attend to the most keys. So a prompt is cut into two chunks per rank, and a rank gets one from the
front and one from the back: the sum of both is the same for all ranks.

Each row is computed on one rank, over all of its keys, and nothing is combined. With
`batch_invariant` the bits are therefore those of `paged_attention` on one rank.
"""

from collections.abc import Sequence

from ...contract.argument_types import typed
from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.parallel import PrefillShare
from ...contract.shapes import Key, LogSumExp, Output, Query, Value
from ...engine.rank_agreement import agree_on_rows
from ...validation.parallel import check_prefill_tokens
from ..attention.paged import paged_attention
from ..parallel.prefill_chunks import share_prompts
from ..parallel.prompt_ranks import PromptRanks


@typed
class PrefillContextParallel(PromptRanks):
    """Attention of one rank's chunks of the prompts of a step.

    All ranks make the same calls in the same order, with the same prompts.

    Args:
        ranks: The group.
        block_size: Slots in a block of the gathered keys.
        device: Of the tokens.

    Raises:
        ValueError: `block_size` is below 1.
        RankError: The ranks do not agree on the block size.

    Source:
        Llama 3, section 3.3.2 (chunks in zig-zag order, keys and values gathered), 2024.

    Example:
        One rank has both chunks of a prompt of three tokens: token 0, then tokens 1 and 2.

        >>> prefill = PrefillContextParallel(RankGroup(), block_size=2)
        >>> share = prefill.prepare([3])
        >>> share.tokens, share.seq_lens
        (tensor([0, 1, 2]), tensor([1, 3], dtype=torch.int32))
        >>> ones, values = torch.ones(3, 1, 1), torch.tensor([3.0, 5.0, 7.0])
        >>> prefill.attend(ones, ones, values.view(3, 1, 1), share).flatten()
        tensor([3., 4., 5.])
    """

    def prepare(self, query_lens: Sequence[int]) -> PrefillShare:
        """Return the chunks that this rank computes, once per step, for all layers.

        Args:
            query_lens: Tokens of each prompt. All of them are new.

        Returns:
            The indices of this rank's tokens, and what `attend` needs. Two requests per prompt.

        Raises:
            ValueError: A length is negative.
            RankError: The ranks do not agree on the prompts.
        """
        self._begin_step(query_lens)
        # step: cut each prompt into two chunks per rank, and find the rows of its keys
        return share_prompts(
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
        share: PrefillShare,
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
            scale, out, lse: As in `paged_attention`.
            options: Those of `paged_attention` that have no entry per request or token.

        Returns:
            `out`, [tokens, query_heads, value_head_size].

        Raises:
            NotImplementedError: An option has an entry per request or token of the batch.
            ValueError: Shapes do not match.
            RankError: Another rank has ended or does not answer.
        """
        check_prefill_tokens(
            query, key, value, share, self.block_size, scale, out, lse, options,
            contents=True,
        )  # fmt: skip
        agree_on_rows(self.ranks, key, value)
        # step: gather the keys and values of all ranks
        tokens, kv_heads, key_size = key.shape
        row_size = key_size + value.shape[-1]
        padded = key.new_zeros(share.max_tokens, kv_heads, row_size)
        padded[:tokens, :, :key_size], padded[:tokens, :, key_size:] = key, value
        gathered = self.ranks.all_gather(padded).flatten(0, 1)
        # step: put them into the order of their positions
        in_order = gathered[share.gathered_rows]
        blocks = len(in_order) // self.block_size
        cache = in_order.view(blocks, self.block_size, kv_heads, row_size)
        # step: attend to the keys up to the end of each chunk
        return paged_attention(
            query,
            cache[..., :key_size],
            cache[..., key_size:],
            share.block_table,
            share.query_start_loc,
            share.seq_lens,
            share.max_query_len,
            share.max_seq_len,
            scale=scale,
            out=out,
            lse=lse,
            options=options,
        )
