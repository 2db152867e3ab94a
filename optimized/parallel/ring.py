"""Ring prefill: keys and values pass from rank to rank, and results of rounds are merged.

The shares alternate between two buffers that are kept. The kernel that writes a cache puts the keys
and values of a rank into the first one. Each attention launch reads the held share in place, while
the process group sends it and receives the other one. The first round writes the total, and one
kernel per later round merges its rows into it in place.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch

from ...contract.argument_types import typed
from ...contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ...contract.parallel import RingShare
from ...contract.shapes import Key, LogSumExp, Output, Query, Value
from ...engine.rank_agreement import agree_on_rows
from ...validation import values_checked
from ...validation.parallel import check_ring_tokens
from ..attention.merge_states import merge_attn_states
from ..attention.paged import paged_attention
from ..cache.cache_ops import reshape_and_cache
from ..parallel.prompt_ranks import PromptRanks
from ..parallel.ring_rounds import list_rounds
from .rank_buffers import RankBuffers


@typed
class RingContextParallel(PromptRanks):
    """Attention of one rank's chunks of the prompts of a step, over shares that go round a ring.

    The ranks are compared when the object is created. Prompts and shapes are compared only if
    contents are validated. Buffers are kept as in `PrefillContextParallel`, so that CUDA graphs of
    several sizes can be captured.
    """

    @cached_property
    def _buffers(self) -> RankBuffers:
        return RankBuffers()

    def prepare(self, query_lens: Sequence[int]) -> RingShare:
        """Return the chunks that this rank computes, once per step, for all layers."""
        self._begin_step(query_lens, is_compared=values_checked(self.device))
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
        """Return attention of this rank's tokens over the prompts up to their positions."""
        check_ring_tokens(query, key, value, share, out, lse, options)
        waits = values_checked(query)
        if waits:
            agree_on_rows(self.ranks, key, value)
        tokens, heads, size = query.shape
        value_size, get = value.shape[-1], self._buffers.get
        # step: put this rank's keys and values into blocks
        shape = (share.num_blocks, self.block_size, key.shape[1], size + value_size)
        held, other = (get(name, shape, key) for name in ("held", "other"))
        reshape_and_cache(key, value, held[..., :size], held[..., size:], share.slots)
        rows, lses = (tokens, heads, value_size), (heads, tokens)
        total, partial = (
            (get(name, rows, query, torch.float32), get(f"{name} lse", lses, query, torch.float32))
            for name in ("total", "partial")
        )  # fmt: skip
        for number, current in enumerate(share.rounds):
            is_last = current is share.rounds[-1]
            if not is_last:
                # step: start to send the held share to the next rank
                arrived = self.ranks.start_shift(held, other, waits)
            if current.max_seq_len:
                target = partial if number else total
                # step: attend to the keys of the held share that precede each chunk
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
                    out=target[0],
                    lse=target[1],
                    options=replace(options, causal=current.causal, sinks=None),
                )
                if number:
                    # step: merge them with the results of the rounds before
                    merge_attn_states(
                        *total, *partial, output=total[0], output_lse=total[1]
                    )
            if not is_last:
                # step: wait for the share of the previous rank
                held, other = arrived(), held
        # step: count the sinks once, after all keys
        if options.sinks is not None:
            nothing = total[0].new_zeros(1, 1, 1).expand(rows)
            sinks = options.sinks.float()[:, None].expand(lses)
            merge_attn_states(
                *total, nothing, sinks, output=total[0], output_lse=total[1]
            )
        out = query.new_empty(rows) if out is None else out
        if lse is not None:
            lse.copy_(total[1])
        return out.copy_(total[0])
