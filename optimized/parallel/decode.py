"""Parallel attention step: ranks share each sequence's keys and combine their partial results.

Buffers are allocated once, so a CUDA graph can capture a step on every rank. The attention kernel
writes rows and log-sum-exps into the buffer that is sent: [ranks, heads, splits, tokens, row], in
which a row has `value_head_size` elements, its log-sum-exp, and padding to 32 bytes. So nothing is
packed. The combine kernel reads the received buffer in place, in the order of the splits, counts
the sinks and writes the output. With symmetric memory it exchanges the rows itself.

The fixed splits of a rank are requests of one launch (`parallel/rank_splits.py`).
"""

from functools import partial

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
from ...validation import values_checked
from ...validation.parallel import (
    check_context_parallel,
    check_rank_attention,
    check_rank_batch,
)
from ..attention.paged import paged_attention
from ..cache.cache_ops import reshape_and_cache
from ..runtime.launcher import bound_kernel_loads
from .combine import ROW_PADDING, add_sinks, combine_received, combine_while_adding
from .rank_batch import make_rank_batch
from .rank_splits import RankSplits, as_runs, scale_as_runs
from .symmetric_ranks import SymmetricRanks


@typed
class DecodeContextParallel:
    """Attention steps of one rank, in a group that shares each sequence's keys.

    The ranks are compared when the object is created. Batches are compared only if contents are
    validated.
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
        self.device = torch.device(device)
        ranks.agree(
            torch=torch.__version__.split("+")[0],
            sizes=[*sizes, value_head_size or head_size],
            exchange=exchange,
            splits=None if splits is None else [splits.count, splits.run],
            dtype=str(dtype),
            implementation=type(self).__module__,
        )
        bound_kernel_loads()
        self._splits = RankSplits(self.of_rank, splits, self.device)
        self._value_size = value_head_size or head_size
        rows = num_query_heads * max_num_tokens

        def buffer(elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(elements, dtype=dtype, device=self.device)

        every = ranks.world_size * rows
        exchanged = every * len(self._splits.own) * (self._value_size + ROW_PADDING)
        self._query = buffer(rows * head_size, dtype)
        self._queries = buffer(every * head_size, dtype)
        self._sent = buffer(exchanged)
        self._partners = None
        if isinstance(ranks, SymmetricRanks) and exchange == "all_to_all":
            self._partners = ranks.find_partners(exchanged)
        self._received = buffer(exchanged) if self._partners is None else self._sent
        self._requests = torch.arange(
            len(self._splits.own) * max_num_tokens + 1,
            dtype=torch.int32,
            device=self.device,
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

        The host does not wait. A block table of the same width as an earlier one copies nothing
        from the host, so a CUDA graph can capture the call.
        """
        is_checked = values_checked(seq_lens)
        if is_checked:
            self.ranks.wait("contents are validated")
        check_rank_batch(
            key_cache, block_table, query_start_loc, seq_lens, num_tokens, max_seq_len,
            self.of_rank, self.max_num_tokens, self.fixed_splits, causal, max_query_len,
            is_checked,
        )  # fmt: skip
        self.ranks.begin_step()
        if is_checked:
            agree_on_batch(
                self.ranks, query_start_loc, seq_lens, num_tokens, max_seq_len,
                key_cache, causal,
            )  # fmt: skip
        return make_rank_batch(
            key_cache, block_table, query_start_loc, seq_lens, num_tokens, max_seq_len,
            causal, num_tokens if max_query_len is None else max_query_len,
            self._splits, self._requests,
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
        """Write the new tokens that this rank stores into its cache."""
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

        Raises:
            NotImplementedError: what `paged_attention` of this package does not compute.
        """
        world_size, heads = self.of_rank[0], self.num_query_heads
        check_rank_attention(
            query, key_cache, value_cache, batch, heads, world_size, options,
            self.fixed_splits, out, lse,
        )  # fmt: skip
        # validation of contents would wait for the collectives without a limit
        waits = values_checked(query)
        # step: gather the query heads of all ranks
        q = self._gather(query, waits)
        # step: attend to the splits that this rank stores
        outs, lses = self._send_buffer(batch, head_size_of(value_cache))
        run = 0 if self.fixed_splits is None else self.fixed_splits.run
        paged_attention(
            q if batch.splits == 1 else q.repeat(batch.splits, 1, 1),
            as_runs(key_cache, run),
            as_runs(value_cache, run),
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            scale=scale,
            out=outs,
            lse=lses,
            options=AttentionOptions(
                causal=False,
                logits_soft_cap=options.logits_soft_cap,
                k_scale=scale_as_runs("k_scale", options.k_scale, key_cache, run),
                v_scale=scale_as_runs("v_scale", options.v_scale, value_cache, run),
                k_global_scale=options.k_global_scale,
                v_global_scale=options.v_global_scale,
                batch_invariant=self.fixed_splits is not None,
            ),
        )
        if out is None:
            out = query.new_empty(*query.shape[:2], head_size_of(value_cache))
        # step: exchange partial results, and combine them by log-sum-exp
        if self.exchange == "all_to_all":
            # the kernel counts the sinks, too
            return self._combine_here(batch, outs, options.sinks, out, lse, waits)
        result, joint = combine_while_adding(self.ranks, outs, lses, waits)
        # step: count the sinks once, after all keys
        if options.sinks is not None:
            result, joint = add_sinks(result, joint, options.sinks, batch)
        if lse is not None:
            lse.copy_(joint.T)
        return out.copy_(result)

    def _gather(self, query: Tensor, waits: bool) -> Tensor:
        """Return the query heads of all ranks, [tokens, ranks * heads, head_size].

        Args:
            waits: As in `RankGroup.all_gather`.
        """
        if self.of_rank[0] == 1:
            return query
        tokens, heads, size = query.shape
        # heads first; a single token is in this order already
        sent = (
            query.view(heads, 1, size)
            if tokens == 1 and query.is_contiguous()
            else None
        )
        if sent is None:
            sent = self._query[: query.numel()].view(heads, tokens, size)
            sent.copy_(query.transpose(0, 1))
        every = self._queries[: query.numel() * self.of_rank[0]]
        every = every.view(self.of_rank[0], heads, tokens, size)
        gathered = self.ranks.all_gather(sent, every, waits)
        return gathered.flatten(0, 1).transpose(0, 1)

    def _send_buffer(self, batch: RankBatch, value_size: int) -> tuple[Tensor, Tensor]:
        """Return the views of the sent buffer that the kernel writes.

        Returns:
            [splits * tokens, ranks * heads, value_head_size] and
            [ranks * heads, splits * tokens].
        """
        every = self.of_rank[0] * self.num_query_heads
        rows = batch.splits * batch.num_tokens
        width = value_size + ROW_PADDING
        sent = self._sent[: every * rows * width].view(every, rows, width)
        return sent[..., :value_size].transpose(0, 1), sent[..., value_size]

    def _combine_here(
        self,
        batch: RankBatch,
        outs: Tensor,
        sinks: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
        waits: bool,
    ) -> Tensor:
        """Exchange and combine the rows of this rank's heads, and return `out`.

        Args:
            outs: [splits * tokens, ranks * heads, value_head_size], in the sent buffer.
            waits: As in `RankGroup.all_gather`.
        """
        value_size = outs.shape[-1]
        shape = (
            self.of_rank[0], self.num_query_heads, batch.splits, batch.num_tokens,
            value_size + ROW_PADDING,
        )  # fmt: skip
        elements = outs.numel() // max(value_size, 1) * (value_size + ROW_PADDING)
        sent = self._sent[:elements].view(shape)
        to_combine = (self._splits.order, batch, sinks, out, lse)
        if self._partners is not None:
            assert isinstance(self.ranks, SymmetricRanks)
            combine = partial(combine_received, sent, *to_combine, self._partners)
            return self.ranks.run_combination(combine, sent, waits)
        received = self._received[:elements].view(shape)
        received = self.ranks.all_to_all(sent, received, waits)
        return combine_received(received, *to_combine)
