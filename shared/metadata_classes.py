"""What does attention need to know about one step?

A step computes a batch of requests at once. Their new tokens lie one after another in one flat
tensor, so everything else is bookkeeping: where each request starts, how long its sequence is,
where its keys and values lie.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from .shapes import BlockTable, SlotMapping, StartLoc, TokenCounts


@dataclass(frozen=True, kw_only=True)
class CommonAttentionMetadata:
    """One step's batch, the same for every layer and backend (vLLM's V1 name).

    Tensors whose name ends in `_cpu` are the host's copy, for planning without a
    synchronisation; the others lie on the device of the cache.

    Args:
        query_start_loc: [reqs + 1] where each request's new tokens start; the last entry is
            their total.
        seq_lens: [reqs] tokens of each sequence in the cache once this step has written its own.
        num_computed_tokens_cpu: [reqs] tokens that were in the cache before the step.
        num_reqs: requests in the batch.
        num_actual_tokens: new tokens in the batch, padding not counted.
        max_query_len: an upper bound on the new tokens of one request.
        max_seq_len: an upper bound on `seq_lens`.
        block_table_tensor: [reqs, max_blocks] block ids; entries past a row's end are never read.
        slot_mapping: [tokens] slot of every new token, or PAD_SLOT_ID.
        causal: a query sees the keys up to its own position.
    """

    query_start_loc: StartLoc
    query_start_loc_cpu: StartLoc
    seq_lens: TokenCounts
    seq_lens_cpu: TokenCounts
    num_computed_tokens_cpu: TokenCounts
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: BlockTable
    slot_mapping: SlotMapping
    causal: bool = True


@dataclass(frozen=True, kw_only=True)
class PagedAttentionMetadata:
    """One step's batch as a backend uses it: decodes first, then prefills.

    Args:
        num_actual_tokens: new tokens, padding not counted.
        max_query_len, max_seq_len: upper bounds on the host.
        query_start_loc: [reqs + 1], on the device of the cache.
        seq_lens: [reqs].
        block_table: [reqs, max_blocks].
        slot_mapping: [tokens].
        num_decodes, num_decode_tokens: the part that comes first.
        num_prefills, num_prefill_tokens: the part behind it.
        query_start_loc_cpu, seq_lens_cpu: the host's copies, for planning.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: StartLoc
    max_seq_len: int
    seq_lens: TokenCounts
    block_table: BlockTable
    slot_mapping: SlotMapping
    num_decodes: int = 0
    num_decode_tokens: int = 0
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    query_start_loc_cpu: StartLoc
    seq_lens_cpu: TokenCounts

    @cached_property
    def decode_metadata(self) -> "PagedAttentionMetadata | None":
        """The requests before the boundary; None if there are none."""
        return self._part(0, self.num_decodes) if self.num_decodes else None

    @cached_property
    def prefill_metadata(self) -> "PagedAttentionMetadata | None":
        """The requests behind the boundary, starts counted from 0; None if there are none."""
        if not self.num_prefills:
            return None
        return self._part(self.num_decodes, self.num_decodes + self.num_prefills)

    def _part(self, first: int, last: int) -> "PagedAttentionMetadata":
        starts = self.query_start_loc_cpu[first : last + 1]
        begin, end = int(starts[0]), int(starts[-1])
        decodes = first < self.num_decodes
        return replace(
            self,
            num_actual_tokens=end - begin,
            max_query_len=int(starts.diff().max()),
            query_start_loc=self.query_start_loc[first : last + 1] - begin,
            max_seq_len=int(self.seq_lens_cpu[first:last].max()),
            seq_lens=self.seq_lens[first:last],
            block_table=self.block_table[first:last],
            slot_mapping=self.slot_mapping[begin:end],
            num_decodes=last - first if decodes else 0,
            num_decode_tokens=end - begin if decodes else 0,
            num_prefills=0 if decodes else last - first,
            num_prefill_tokens=0 if decodes else end - begin,
            query_start_loc_cpu=starts - begin,
            seq_lens_cpu=self.seq_lens_cpu[first:last],
        )
