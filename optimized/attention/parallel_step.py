"""Parallel attention step: ranks share each sequence's keys and combine their partial results.

Buffers are allocated once, so a CUDA graph can capture a step on every rank. The attention kernel
writes rows and log-sum-exps into the buffer that is sent: [ranks, heads, splits, tokens, row], in
which a row has `value_head_size` elements, its log-sum-exp, and padding to 16 bytes. So nothing is
packed. The combine kernel reads the received buffer in place, if no fixed splits reorder it.

The fixed splits of a rank are requests of one launch. Their keys are runs of slots, so the cache is
viewed as blocks of one run, and a block table lists the runs of each split.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...bookkeeping.attention.key_splits import (
    offsets_of_runs,
    order_of_partials,
    stored_splits,
)
from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.kinds import PAD_SLOT_ID
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
from ...engine.rank_group import RankGroup, agree_on_batch
from ...validation import values_checked
from ...validation.cascade import count_share
from ...validation.parallel import (
    check_context_parallel,
    check_rank_attention,
    check_rank_batch,
)
from ..cache.cache_ops import reshape_and_cache
from .merge_states import lse_weighted_combine
from .paged import paged_attention

_ROW_PADDING = 4
"""Elements after the values of a row: its log-sum-exp, and padding to 16 bytes."""


class _Runs(NamedTuple):
    """Where the runs of this rank's splits are in a row of the block table.

    Args:
        column: [splits * runs] entry of the row.
        within: [splits, runs] the run's index in that block.
        per_block: runs between the starts of two blocks.
    """

    column: Tensor
    within: Tensor
    per_block: int


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
            sizes=[*sizes, value_head_size],
            exchange=exchange,
            splits=None if splits is None else [splits.count, splits.run],
            dtype=str(dtype),
        )
        # without fixed splits each rank's share is one split
        self.splits = splits or KeySplits(ranks.world_size, interleave_size)
        self._own = [ranks.rank]
        order = list(range(ranks.world_size))
        if splits is not None:
            self._own = stored_splits(splits, *of_rank, interleave_size)
            order = order_of_partials(splits, ranks.world_size, interleave_size)
        self._is_in_order = order == sorted(order)
        self._order = torch.tensor(order, device=self.device)
        first = [split * self.splits.run for split in self._own]
        self._first = torch.tensor(first, dtype=torch.int32, device=self.device)
        self._runs: dict[tuple[int, ...], _Runs] = {}
        self._value_size = value_head_size or head_size
        rows = num_query_heads * max_num_tokens

        def buffer(elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(elements, dtype=dtype, device=self.device)

        every = ranks.world_size * rows
        exchanged = every * len(self._own) * (self._value_size + _ROW_PADDING)
        self._query = buffer(rows * head_size, dtype)
        self._queries = buffer(every * head_size, dtype)
        self._sent = buffer(exchanged)
        self._received = buffer(exchanged)
        self._requests = torch.arange(
            len(self._own) * max_num_tokens + 1,
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
    ) -> RankBatch:
        """Return the batch of this rank, once per step, for all layers.

        The host does not wait. A block table of the same width as an earlier one copies nothing
        from the host, so a CUDA graph can capture the call.
        """
        is_checked = values_checked()
        check_rank_batch(
            key_cache, block_table, query_start_loc, seq_lens, num_tokens, max_seq_len,
            self.of_rank, self.max_num_tokens, self.fixed_splits, causal, is_checked,
        )  # fmt: skip
        self.ranks.begin_step()
        if is_checked:
            agree_on_batch(
                self.ranks, query_start_loc, seq_lens, num_tokens, max_seq_len
            )
        if not len(block_table):
            return self._empty_batch(num_tokens)
        # step: find each token's position
        token = self._requests[:num_tokens]
        starts = query_start_loc.contiguous()
        req = torch.searchsorted(starts[1:], token, right=True)
        is_token = token < starts[-1]
        req = req.clamp(max=len(block_table) - 1)
        seq_len = seq_lens[req]
        position = torch.where(is_token, seq_len - starts[req + 1] + token, 0)
        up_to = torch.where(is_token, position + 1 if causal else seq_len, 0)
        rows = block_table[req]
        # step: find the slots of the split's keys
        table, per_block = self._tables(rows, key_cache)
        # step: count its keys up to that position
        splits = self.splits
        tokens_per_round = splits.run * splits.count
        rest = (up_to % tokens_per_round)[None, :] - self._first[:, None]
        lens = (up_to // tokens_per_round)[None, :] * splits.run
        lens = lens + rest.clamp(0, splits.run)
        # step: find the new token's slot if this rank stores it
        slots = self._slots(rows, position, key_cache.shape[1])
        if not causal:
            slots = torch.full_like(slots, PAD_SLOT_ID)
        requests = len(self._own) * num_tokens
        return RankBatch(
            num_tokens=num_tokens,
            splits=len(self._own),
            block_table=table,
            query_start_loc=self._requests[: requests + 1],
            seq_lens=lens.flatten().to(torch.int32),
            max_seq_len=count_share(
                max_seq_len, splits.count, self._own[0], splits.run
            ),
            slot_mapping=torch.where(is_token, slots, PAD_SLOT_ID),
            is_token=is_token,
            slots_per_block=per_block,
        )

    def _tables(self, rows: Tensor, key_cache: Tensor) -> tuple[Tensor, int]:
        """Return the block table of each split and token, and the slots in one of its blocks.

        Args:
            rows: [tokens, max_blocks] the row of each token's request.
        """
        if self.fixed_splits is None:
            return rows, key_cache.shape[1]
        key = (rows.shape[1], key_cache.shape[1], *key_cache.stride()[:2])
        runs = self._runs.get(key)
        if runs is None:
            runs = self._runs[key] = self._find_runs(rows.shape[1], key_cache)
        entries = rows[:, runs.column] * runs.per_block
        entries = entries.view(len(rows), *runs.within.shape) + runs.within
        return entries.transpose(0, 1).flatten(0, 1), self.splits.run

    def _find_runs(self, max_blocks: int, key_cache: Tensor) -> _Runs:
        """Return where the runs of each split are, for one width of the block table."""
        world_size, _, interleave_size = self.of_rank
        run, block_size = self.splits.run, key_cache.shape[1]
        num_runs = -(-max_blocks * block_size // (run * len(self._own)))
        offsets = torch.stack(
            [
                offsets_of_runs(
                    self.splits, split, num_runs, world_size, interleave_size
                )
                for split in self._own
            ]
        )
        # the last entries of a row may be past its end; then no split reads them
        column = (offsets // block_size).clamp(max=max_blocks - 1)
        within = (offsets % block_size // run).to(torch.int32)
        per_block = _runs_per_block(key_cache, run)
        return _Runs(
            column.flatten().to(self.device), within.to(self.device), per_block
        )

    def _slots(self, rows: Tensor, position: Tensor, block_size: int) -> Tensor:
        """Return the slot of each position on this rank, PAD_SLOT_ID if it is on another one."""
        world_size, rank, interleave_size = self.of_rank
        group = position // interleave_size
        offset = group // world_size * interleave_size + position % interleave_size
        column = (offset // block_size).clamp(max=rows.shape[1] - 1).long()
        block = rows.gather(1, column[:, None])[:, 0].long()
        slot = block * block_size + offset % block_size
        return torch.where(group % world_size == rank, slot, PAD_SLOT_ID)

    def _empty_batch(self, num_tokens: int) -> RankBatch:
        """Return the batch of a step without requests, in which all tokens are padding."""
        requests = len(self._own) * num_tokens
        nothing = torch.zeros(requests, 0, dtype=torch.int32, device=self.device)
        slots = torch.full((num_tokens,), PAD_SLOT_ID, device=self.device)
        return RankBatch(
            num_tokens=num_tokens,
            splits=len(self._own),
            block_table=nothing,
            query_start_loc=self._requests[: requests + 1],
            seq_lens=torch.zeros(requests, dtype=torch.int32, device=self.device),
            max_seq_len=0,
            slot_mapping=slots,
            is_token=slots != PAD_SLOT_ID,
            slots_per_block=self.splits.run,
        )

    def write(
        self,
        key: Key,
        value: Value,
        key_cache: KeyCache,
        value_cache: ValueCache,
        batch: RankBatch,
        k_scale: Scale | float | None = None,
        v_scale: Scale | float | None = None,
    ) -> None:
        """Write the new tokens that this rank stores into its cache."""
        # step: write each token that has a slot on this rank
        reshape_and_cache(
            key, value, key_cache, value_cache, batch.slot_mapping, k_scale, v_scale
        )

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
        # step: gather the query heads of all ranks
        q = self._gather(query)
        # step: attend to the splits that this rank stores
        outs, lses = self._send_buffer(batch, value_cache.shape[-1])
        run = 0 if self.fixed_splits is None else self.splits.run
        paged_attention(
            q if batch.splits == 1 else q.repeat(batch.splits, 1, 1),
            _as_runs(key_cache, run),
            _as_runs(value_cache, run),
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            max_query_len=1,
            max_seq_len=batch.max_seq_len,
            scale=scale,
            out=outs,
            lse=lses,
            options=AttentionOptions(
                causal=False,
                logits_soft_cap=options.logits_soft_cap,
                k_scale=options.k_scale,
                v_scale=options.v_scale,
                batch_invariant=self.fixed_splits is not None,
            ),
        )
        # step: exchange partial results, and combine them by log-sum-exp
        if self.exchange == "all_to_all":
            result, joint = self._combine_here(batch, outs)
        else:
            result, joint = self._combine_while_adding(outs, lses)
        # step: count the sinks once, after all keys
        if options.sinks is not None:
            result, joint = self._add_sinks(result, joint, options.sinks, batch)
        out = query.new_empty(result.shape) if out is None else out
        if lse is not None:
            lse.copy_(joint.T)
        return out.copy_(result)

    def _gather(self, query: Tensor) -> Tensor:
        """Return the query heads of all ranks, [tokens, ranks * heads, head_size]."""
        if self.of_rank[0] == 1:
            return query
        tokens, heads, size = query.shape
        sent = self._query[: query.numel()].view(heads, tokens, size)
        sent.copy_(query.transpose(0, 1))
        every = self._queries[: query.numel() * self.of_rank[0]]
        every = every.view(self.of_rank[0], heads, tokens, size)
        return self.ranks.all_gather(sent, every).flatten(0, 1).transpose(0, 1)

    def _send_buffer(self, batch: RankBatch, value_size: int) -> tuple[Tensor, Tensor]:
        """Return the views of the sent buffer that the kernel writes.

        Returns:
            [splits * tokens, ranks * heads, value_head_size] and
            [ranks * heads, splits * tokens].
        """
        every = self.of_rank[0] * self.num_query_heads
        rows = batch.splits * batch.num_tokens
        width = value_size + _ROW_PADDING
        sent = self._sent[: every * rows * width].view(every, rows, width)
        return sent[..., :value_size].transpose(0, 1), sent[..., value_size]

    def _combine_here(self, batch: RankBatch, outs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the combined rows of this rank's heads, from one packed exchange.

        Args:
            outs: [splits * tokens, ranks * heads, value_head_size], in the sent buffer.

        Returns:
            [tokens, heads, value_head_size], [tokens, heads].
        """
        value_size = outs.shape[-1]
        shape = (
            self.of_rank[0], self.num_query_heads, batch.splits, batch.num_tokens,
            value_size + _ROW_PADDING,
        )  # fmt: skip
        elements = outs.numel() // max(value_size, 1) * (value_size + _ROW_PADDING)
        sent = self._sent[:elements].view(shape)
        received = self._received[:elements].view(shape)
        received = self.ranks.all_to_all(sent, received)
        partials = received.permute(
            0, 2, 3, 1, 4
        )  # [ranks, splits, tokens, heads, row]
        if batch.splits == 1:
            partials = partials[:, 0]
        elif self.of_rank[0] == 1:
            partials = partials[0]
        else:
            partials = partials.flatten(0, 1)
        if not self._is_in_order:
            partials = partials[self._order]
        return lse_weighted_combine(
            partials[..., :value_size], partials[..., value_size]
        )

    def _combine_while_adding(
        self, outs: Tensor, lses: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the combined rows of this rank's heads, whose collective adds weighted rows.

        Args:
            outs: [tokens, ranks * heads, value_head_size].
            lses: [ranks * heads, tokens].

        Returns:
            [tokens, heads, value_head_size], [tokens, heads].
        """
        joint = self.ranks.all_gather(lses.contiguous()).logsumexp(0)
        weights = torch.exp(lses - torch.where(joint.isinf(), 0.0, joint))
        weighted = weights[..., None] * outs.transpose(0, 1)
        heads = self.num_query_heads
        result = self.ranks.reduce_scatter(
            weighted.view(self.of_rank[0], heads, *weighted.shape[1:])
        )
        begin = self.of_rank[1] * heads
        return result.transpose(0, 1), joint[begin : begin + heads].T

    def _add_sinks(
        self, result: Tensor, joint: Tensor, sinks: Tensor, batch: RankBatch
    ) -> tuple[Tensor, Tensor]:
        """Return rows and log-sum-exps with one more score per head, which has no value.

        Args:
            result, joint: [tokens, heads, value_head_size], [tokens, heads].
            sinks: [heads].
            batch: Its padding gets no sink.
        """
        sinks = torch.where(batch.is_token[:, None], sinks.to(joint.dtype), -torch.inf)
        return lse_weighted_combine(
            torch.stack([result, torch.zeros_like(result)]), torch.stack([joint, sinks])
        )


def _runs_per_block(cache: Tensor, run: int) -> int:
    """Return how many runs of slots there are between the starts of two blocks.

    Raises:
        ValueError: The distance between two blocks is not a multiple of a run.
    """
    block, slot = cache.stride()[:2]
    if block % (slot * run):
        raise ValueError(
            f"the cache has strides {block} per block and {slot} per slot: expected a multiple of"
            f" {run} slots per block; use a contiguous cache"
        )
    return block // (slot * run)


def _as_runs(cache: Tensor, run: int) -> Tensor:
    """Return a cache as blocks of one run each, [blocks, run, kv_heads, size]. If 0, as it is."""
    if not run:
        return cache
    num_blocks, block_size, kv_heads, size = cache.shape
    per_block = _runs_per_block(cache, run)
    _, slot, head, element = cache.stride()
    return cache.as_strided(
        ((num_blocks - 1) * per_block + block_size // run, run, kv_heads, size),
        (slot * run, slot, head, element),
    )
