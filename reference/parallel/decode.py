"""Parallel attention step: ranks share each sequence's keys and combine their partial results.

Each rank has some of the query heads, and a share of every sequence's keys
(`attention/context_parallel.py`). In a step it writes the new tokens that it stores. Then it
receives the queries of all ranks, attends to its own keys with them, and sends each rank the
partial results of that rank's heads. A rank combines what it receives by log-sum-exp, in float32
and in a fixed order.

The sum of rounded numbers depends on how they are grouped. So results on two ranks and on one rank
differ in their last bits, unless the groups are fixed. `KeySplits` fixes them: a key's position
alone decides to which split it belongs, each split has its own partial result, and these are
combined in the order of the splits. Then the bits do not depend on the number of ranks.
"""

import torch
from torch import Tensor

from ...contract.argument_types import typed
from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.cache_formats import head_size_of
from ...contract.parallel import KeySplits, RankBatch
from ...contract.shapes import (
    BlockTable,
    Key,
    KeyCache,
    LogSumExp,
    Output,
    Query,
    Scale,
    StartLoc,
    TokenCounts,
    Value,
    ValueCache,
)
from ...engine.rank_agreement import agree_on_batch
from ...engine.rank_group import RankGroup
from ...validation.parallel import (
    check_context_parallel,
    check_rank_attention,
    check_rank_batch,
)
from ..attention.paged import paged_attention
from ..cache.cache_ops import reshape_and_cache
from ..parallel.key_splits import order_of_partials
from .combine import add_sinks, combine_received, combine_while_adding
from .rank_batch import make_rank_batch


@typed
class DecodeContextParallel:
    """Attention steps of one rank, in a group that shares each sequence's keys.

    All ranks make the same calls in the same order, with the same batch.

    Args:
        ranks: The group.
        num_query_heads: Query heads of this rank, the same number on all ranks. Rank r has those
            from r * num_query_heads on.
        head_size: Elements of a key.
        max_num_tokens: New tokens of the largest step, for which buffers are allocated.
        interleave_size: Consecutive positions that one rank stores, a divisor of the block size.
        exchange: "all_to_all": one collective sends the partial results, which the receiver
            combines. "reduce_scatter": log-sum-exps are gathered, each rank weights its results,
            and the collective adds them.
        splits: Optional. Fixed splits. Then the results are batch-invariant, and have the same
            bits on any number of ranks. If None, each rank's share is one partial result.
        value_head_size: Optional. Elements of a value. If None, as many as of a key.
        dtype: Of the queries.
        device: Of the cache.

    Raises:
        ValueError: A number is out of range, or a split has keys of several ranks.
        RankError: The ranks do not agree on one of the arguments, or on the version of torch.

    Source:
        vLLM's decode context parallelism; section 2.2 of Juravsky et al., "Hydragen", 2024.

    Example:
        One rank and three splits: keys 0 and 3, key 1, and key 2. The new token is the last one.

        >>> step = DecodeContextParallel(
        ...     RankGroup(),
        ...     num_query_heads=1,
        ...     head_size=1,
        ...     max_num_tokens=1,
        ...     splits=KeySplits(count=3),
        ... )
        >>> keys, values = torch.ones(3, 2, 1, 1), torch.arange(6.0).view(3, 2, 1, 1)
        >>> batch = step.prepare(
        ...     keys,
        ...     block_table=torch.tensor([[2, 0]], dtype=torch.int32),
        ...     query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        ...     seq_lens=torch.tensor([4], dtype=torch.int32),
        ...     num_tokens=1,
        ...     max_seq_len=4,
        ... )
        >>> batch.seq_lens, batch.slot_mapping
        (tensor([2, 1, 1], dtype=torch.int32), tensor([1]))
        >>> step.write(torch.ones(1, 1, 1), torch.full((1, 1, 1), 7.0), keys, values, batch)
        >>> step.attend(torch.ones(1, 1, 1), keys, values, batch).flatten()
        tensor([4.])
    """

    def __init__(
        self,
        ranks: RankGroup,
        num_query_heads: int,
        head_size: int,
        max_num_tokens: int,
        interleave_size: int = 1,
        exchange: str = "all_to_all",
        splits: KeySplits | None = None,
        value_head_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Compare the arguments among the ranks, and allocate the buffers."""
        of_rank = (ranks.world_size, ranks.rank)
        sizes = (num_query_heads, head_size, max_num_tokens, interleave_size)
        check_context_parallel(*of_rank, *sizes, exchange, splits)
        self.ranks = ranks
        self.of_rank = (*of_rank, interleave_size)
        self.num_query_heads = num_query_heads
        self.max_num_tokens = max_num_tokens
        self.exchange = exchange
        self.fixed_splits = splits
        # without fixed splits each rank's share is one split
        self.splits = splits or KeySplits(ranks.world_size, interleave_size)
        ranks.agree(
            torch=torch.__version__.split("+")[0],
            sizes=[*sizes, value_head_size or head_size],
            exchange=exchange,
            splits=None if splits is None else [splits.count, splits.run],
            dtype=str(dtype),
            implementation=type(self).__module__,
        )

    def prepare(
        self,
        key_cache: KeyCache,
        block_table: BlockTable,
        query_start_loc: StartLoc,
        seq_lens: TokenCounts,
        num_tokens: int,
        max_seq_len: int,
        causal: bool = True,
        max_query_len: int | None = None,
    ) -> RankBatch:
        """Return the batch of this rank, once per step, for all layers.

        Args:
            key_cache: [num_blocks, block_size, kv_heads, head_size] of any layer. Only its shape
                and strides are read.
            block_table: [reqs, max_blocks], this rank's. Its keys are stored in the blocks
                without gaps, in the order of their positions.
            query_start_loc: [reqs + 1] where each request's new tokens start.
            seq_lens: [reqs] keys of each sequence on all ranks together, the new ones included.
            num_tokens: New tokens of the step. Those past the last request are padding.
            max_seq_len: At least every entry of `seq_lens`.
            causal: Whether a token attends only to keys up to its own position. False for
                cross-attention, and for the keys before a chunk of a prompt; then the new tokens
                are not stored.
            max_query_len: Optional. At least the new tokens of every request. If None,
                `num_tokens`. Only a step that is not causal depends on it.

        Returns:
            Requests that need no mask. In a causal step each new token is a request per split
            that this rank stores, and attends to the first keys of the split. If the step is not
            causal and the splits are not fixed, its requests stay whole, so that the keys of a
            request are read once per tile of queries.

        Raises:
            IndexError: A row does not hold the rank's share of a sequence.
            ValueError: More tokens than the buffers hold, or lengths that do not match.
            RankError: The ranks do not agree on the batch, or on the shape of a block.
        """
        check_rank_batch(
            key_cache, block_table, query_start_loc, seq_lens, num_tokens, max_seq_len,
            self.of_rank, self.max_num_tokens, self.fixed_splits, causal, max_query_len,
            contents=True,
        )  # fmt: skip
        self.ranks.begin_step()
        agree_on_batch(
            self.ranks, query_start_loc, seq_lens, num_tokens, max_seq_len, key_cache,
            causal,
        )  # fmt: skip
        return make_rank_batch(
            key_cache, block_table, query_start_loc, seq_lens, num_tokens, max_seq_len,
            causal, num_tokens if max_query_len is None else max_query_len,
            not causal and self.fixed_splits is None, self.splits, self.of_rank,
        )  # fmt: skip

    def write(
        self,
        key: Key,
        value: Value,
        key_cache: KeyCache,
        value_cache: ValueCache,
        batch: RankBatch,
        k_scale: Scale | float | None = None,
        v_scale: Scale | float | None = None,
        kv_cache_dtype: str | None = None,
        k_global_scale: float | None = None,
        v_global_scale: float | None = None,
    ) -> None:
        """Write the new tokens that this rank stores into its cache.

        Args:
            key: [tokens, kv_heads, head_size] of all new tokens, the same on all ranks.
            value: [tokens, kv_heads, value_head_size].
            key_cache: [num_blocks, block_size, kv_heads, head_size], modified in place.
            value_cache: [num_blocks, block_size, kv_heads, value_head_size], modified in place.
            batch: That of `prepare`.
            k_scale, v_scale, kv_cache_dtype, k_global_scale, v_global_scale: As in
                `reshape_and_cache`.

        Raises:
            ValueError: Shapes do not match.
            TypeError: A dtype is not the expected one.
        """
        # step: write each token that has a slot on this rank
        reshape_and_cache(
            key, value, key_cache, value_cache, batch.slot_mapping, k_scale, v_scale,
            kv_cache_dtype, k_global_scale, v_global_scale,
        )  # fmt: skip

    def attend(
        self,
        query: Query,
        key_cache: KeyCache,
        value_cache: ValueCache,
        batch: RankBatch,
        scale: float | None = None,
        out: Output | None = None,
        lse: LogSumExp | None = None,
        options: AttentionOptions = DEFAULT_OPTIONS,
    ) -> Output:
        """Return attention of this rank's query heads over the whole sequences.

        Args:
            query: [tokens, num_query_heads, head_size], this rank's heads.
            key_cache: [num_blocks, block_size, kv_heads, head_size], this rank's. `kv_heads`
                divides the query heads of all ranks together.
            value_cache: [num_blocks, block_size, kv_heads, value_head_size], this rank's.
            batch: That of `prepare`.
            scale: Factor of the dot products. If None, 1 / sqrt(head_size).
            out: Optional. [tokens, num_query_heads, value_head_size], modified in place. If None,
                a new tensor in the dtype of `query` is returned.
            lse: Optional. [num_query_heads, tokens], modified in place.
            options: `logits_soft_cap`, `sinks` (of this rank's heads), `k_scale` and `v_scale`.

        Returns:
            `out`. Tokens without a key on any rank get 0 and the log-sum-exp -inf.

        Raises:
            NotImplementedError: An option depends on distances, which a rank does not know.
            ValueError: Shapes do not match, or `batch_invariant` without fixed splits.
            RankError: Another rank has ended or does not answer.
        """
        world_size, heads = self.of_rank[0], self.num_query_heads
        check_rank_attention(
            query, key_cache, value_cache, batch, heads, world_size, options,
            self.fixed_splits, out, lse,
        )  # fmt: skip
        # step: gather the query heads of all ranks
        gathered = self.ranks.all_gather(query.contiguous())
        q = gathered.transpose(0, 1).flatten(1, 2)  # [tokens, ranks * heads, head_size]
        # step: attend to the splits that this rank stores
        rows, value_size = batch.splits * batch.num_tokens, head_size_of(value_cache)
        dtype = torch.promote_types(query.dtype, torch.float32)
        outs = q.new_zeros(rows, world_size * heads, value_size, dtype=dtype)
        lses = outs.new_zeros(world_size * heads, rows)
        paged_attention(
            q.repeat(batch.splits, 1, 1),
            # each slot is a block of its own
            _as_slots(key_cache),
            _as_slots(value_cache),
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            scale=scale,
            out=outs,
            lse=lses,
            compute_dtype=dtype,
            options=AttentionOptions(
                causal=False,
                logits_soft_cap=options.logits_soft_cap,
                k_scale=_of_slots(options.k_scale),
                v_scale=_of_slots(options.v_scale),
                k_global_scale=options.k_global_scale,
                v_global_scale=options.v_global_scale,
                batch_invariant=self.fixed_splits is not None,
            ),
        )
        outs = outs.view(batch.splits, len(q), world_size, heads, value_size)
        lses = lses.view(world_size, heads, batch.splits, len(q)).permute(2, 3, 0, 1)
        # step: exchange partial results, and combine them by log-sum-exp
        if self.exchange == "all_to_all":
            order = order_of_partials(self.splits, world_size, self.of_rank[2])
            result, joint = combine_received(self.ranks, outs, lses, order)
        else:
            result, joint = combine_while_adding(self.ranks, outs, lses)
        # step: count the sinks once, after all keys
        if options.sinks is not None:
            result, joint = add_sinks(result, joint, options.sinks, batch)
        out = query.new_empty(result.shape) if out is None else out
        if lse is not None:
            lse.copy_(joint.T)
        return out.copy_(result)


def _as_slots(cache: Tensor) -> Tensor:
    """Return a cache, or the scales of its slots, as blocks of one slot each."""
    return cache.flatten(0, 1)[:, None]


def _of_slots(scale: Tensor | float | None) -> Tensor | float | None:
    """Return a scale for blocks of one slot each."""
    is_measured = isinstance(scale, Tensor) and scale.dim() >= 3
    return _as_slots(scale) if is_measured and isinstance(scale, Tensor) else scale
