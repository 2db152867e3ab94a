"""Prefill context parallelism: ranks compute chunks of each prompt in zig-zag order.

Keys and values travel in one collective, from a buffer that is kept. One kernel copies the gathered
rows into the order of their positions, where both chunks of a prompt read them through one row of
the block table each.
"""

from collections.abc import Sequence
from functools import cached_property

import torch

from ...contract.argument_types import typed
from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.parallel import PrefillShare
from ...contract.shapes import Key, LogSumExp, Output, Query, Value
from ...engine.rank_agreement import agree_on_rows
from ...validation import values_checked
from ...validation.parallel import check_prefill_tokens
from ..attention.paged import paged_attention
from ..parallel.prefill_chunks import share_prompts
from ..parallel.prompt_ranks import PromptRanks
from .rank_buffers import RankBuffers


@typed
class PrefillContextParallel(PromptRanks):
    """Attention of one rank's chunks of the prompts of a step.

    Buffers are allocated at the first step of a size, and kept with their addresses also after a
    larger one. So CUDA graphs of several sizes can be captured, in any order, each after a step of
    its size. A graph also reads its share, which is to be kept as long as the graph.
    """

    @cached_property
    def _buffers(self) -> RankBuffers:
        return RankBuffers()

    def prepare(self, query_lens: Sequence[int]) -> PrefillShare:
        """Return the chunks that this rank computes, once per step, for all layers."""
        self._begin_step(query_lens, is_compared=values_checked(self.device))
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
        """Return attention of this rank's tokens over the prompts up to their positions."""
        waits = values_checked(query)
        check_prefill_tokens(
            query, key, value, share, self.block_size, scale, out, lse, options,
            contents=waits,
        )  # fmt: skip
        if waits:
            agree_on_rows(self.ranks, key, value)
        tokens, kv_heads, head_size = key.shape
        width = head_size + value.shape[-1]
        # step: gather the keys and values of all ranks
        shape = (share.max_tokens, kv_heads, width)
        sent = self._buffers.get("sent", shape, key)
        sent[:tokens, :, :head_size] = key
        sent[:tokens, :, head_size:] = value
        every = self._buffers.get("received", (self.ranks.world_size, *shape), key)
        gathered = self.ranks.all_gather(sent, every, waits).flatten(0, 1)
        # step: put them into the order of their positions
        slots = len(share.gathered_rows)
        in_order = self._buffers.get("in order", (slots, kv_heads, width), key)
        torch.index_select(gathered, 0, share.gathered_rows, out=in_order)
        cache = in_order.view(
            slots // self.block_size, self.block_size, kv_heads, width
        )
        # step: attend to the keys up to the end of each chunk
        return paged_attention(
            query,
            cache[..., :head_size],
            cache[..., head_size:],
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
