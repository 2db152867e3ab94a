"""What does attention need to know about one step?

A step computes a batch of requests at once. Their new tokens lie one after another in one flat
tensor, so everything else is bookkeeping: where each request starts, how long its sequence is,
where its keys and values lie.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

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
        logits_indices_padded: [logits] tokens whose logits are wanted, rising; entries from
            `num_logits_indices` on are padding.
        num_logits_indices: how many of them count; None: not known, as there are none.
        max_logits_per_req: an upper bound on the wanted logits of one request.
        encoder_seq_lens, encoder_seq_lens_cpu: [reqs] tokens of each request's encoder, for
            cross-attention.
        dcp_local_seq_lens, dcp_local_seq_lens_cpu: [reqs] the keys of each sequence that this
            rank of a decode context parallel group holds.
        positions: [tokens] position of every new token in its sequence.
        is_prefilling: [reqs] on the host: the request has not computed its whole prompt yet.
        mm_req_doc_ranges: for each request that has images, their spans: first and last
            position; within a span tokens see each other both ways.
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
    logits_indices_padded: Tensor | None = None
    num_logits_indices: int | None = None
    max_logits_per_req: int | None = None
    encoder_seq_lens: Tensor | None = None
    encoder_seq_lens_cpu: Tensor | None = None
    dcp_local_seq_lens: Tensor | None = None
    dcp_local_seq_lens_cpu: Tensor | None = None
    positions: Tensor | None = None
    is_prefilling: Tensor | None = None
    mm_req_doc_ranges: Mapping[int, Sequence[tuple[int, int]]] | None = None

    @property
    def seq_lens_cpu_upper_bound(self) -> TokenCounts:
        """`seq_lens_cpu` under vLLM's newer name: it is exact here, so it bounds itself."""
        return self.seq_lens_cpu

    def batch_size(self) -> int:
        """Return how many requests the tensors describe, padding included."""
        return self.seq_lens.shape[0]

    def naive_query_lens(self) -> TokenCounts:
        """Return the new tokens of each request, computed on the device: [reqs] int32."""
        return self.query_start_loc.diff()

    def compute_num_computed_tokens(self) -> TokenCounts:
        """Return the tokens in the cache before the step, [reqs] on the device, computed once."""
        return self._num_computed_tokens

    @cached_property
    def _num_computed_tokens(self) -> TokenCounts:
        return self.seq_lens - self.naive_query_lens()

    def token_to_req_indices(self) -> Tensor:
        """Return the request of each new token: [num_actual_tokens] int32 on the device.

        A token behind the last request gets the number of requests.
        """
        ends = self.query_start_loc[1:]
        tokens = torch.arange(
            self.num_actual_tokens, dtype=ends.dtype, device=ends.device
        )
        return torch.bucketize(tokens, ends, out_int32=True, right=True)

    def replace(self, **changes: Any) -> "CommonAttentionMetadata":
        """Return a copy with some fields changed; nothing computed from the old ones is kept."""
        return replace(self, **changes)

    def unpadded(
        self, num_actual_tokens: int, num_actual_reqs: int
    ) -> "CommonAttentionMetadata":
        """Return the first requests and tokens alone, without the padding behind them.

        Args:
            num_actual_tokens: tokens to keep.
            num_actual_reqs: requests to keep; all of their tokens are kept.

        Raises:
            IndexError: more than the batch has.
        """
        for name, count, there in (
            ("num_actual_reqs", num_actual_reqs, self.num_reqs),
            ("num_actual_tokens", num_actual_tokens, self.slot_mapping.shape[0]),
        ):
            if not 0 <= count <= there:
                raise IndexError(
                    f"{name} = {count}: expected 0 to {there}, what there is"
                )
        changes = cut_fields(
            self, slice(0, num_actual_reqs), slice(0, num_actual_tokens)
        )
        return replace(
            self,
            query_start_loc=self.query_start_loc[: num_actual_reqs + 1],
            query_start_loc_cpu=self.query_start_loc_cpu[: num_actual_reqs + 1],
            num_reqs=num_actual_reqs,
            num_actual_tokens=num_actual_tokens,
            **changes,
        )


# What becomes of each field of CommonAttentionMetadata when a batch is cut. Every field stands in
# exactly one of these, which a test holds: a field added later cannot be forgotten.
FIELDS_PER_REQUEST = (
    "seq_lens",
    "seq_lens_cpu",
    "num_computed_tokens_cpu",
    "block_table_tensor",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu",
    "is_prefilling",
)
FIELDS_PER_TOKEN = ("slot_mapping", "positions")
FIELDS_CARRIED = ("causal", "max_logits_per_req")
FIELDS_CUT_BY_HAND = (
    "query_start_loc",
    "query_start_loc_cpu",
    "num_reqs",
    "num_actual_tokens",
    "max_query_len",
    "max_seq_len",
    "logits_indices_padded",
    "num_logits_indices",
    "mm_req_doc_ranges",
)


def cut_fields(
    metadata: CommonAttentionMetadata, request_slice: slice, token_slice: slice
) -> dict[str, Any]:
    """Return the fields that have an entry for each request or token, cut to some of them.

    Args:
        metadata: the batch.
        request_slice, token_slice: what is kept, as start and stop.

    Returns:
        Views by field name; the keys of `mm_req_doc_ranges` count from the first kept request.
    """
    cut: dict[str, Any] = {}
    for names, kept in (
        (FIELDS_PER_REQUEST, request_slice),
        (FIELDS_PER_TOKEN, token_slice),
    ):
        for name in names:
            value = getattr(metadata, name)
            cut[name] = None if value is None else value[kept]
    if metadata.mm_req_doc_ranges is not None:
        first, last = request_slice.start, request_slice.stop
        cut["mm_req_doc_ranges"] = {
            req - first: ranges
            for req, ranges in metadata.mm_req_doc_ranges.items()
            if first <= req < last
        }
    return cut


@dataclass(frozen=True)
class UBatchSlice:
    """One micro-batch of a step: which requests it touches, and which tokens it takes.

    Args:
        request_slice: requests, the cut ones at either end included.
        token_slice: new tokens, counted over the whole batch.
    """

    request_slice: slice
    token_slice: slice

    @property
    def num_tokens(self) -> int:
        return int(self.token_slice.stop - self.token_slice.start)


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
        """The requests before the boundary; None if they bring no token."""
        return self._part(0, self.num_decodes) if self.num_decode_tokens else None

    @cached_property
    def prefill_metadata(self) -> "PagedAttentionMetadata | None":
        """The requests behind the boundary, starts counted from 0; None if there are none."""
        if not self.num_prefills:
            return None
        return self._part(self.num_decodes, self.num_decodes + self.num_prefills)

    def _part(self, first: int, last: int) -> "PagedAttentionMetadata":
        starts = self.query_start_loc_cpu[first : last + 1]
        begin, end = int(starts[0]), int(starts[-1])
        # a part has no parts, so its counters are 0
        return replace(
            self,
            num_actual_tokens=end - begin,
            max_query_len=int(starts.diff().max()),
            query_start_loc=self.query_start_loc[first : last + 1] - begin,
            max_seq_len=int(self.seq_lens_cpu[first:last].max()),
            seq_lens=self.seq_lens[first:last],
            block_table=self.block_table[first:last],
            slot_mapping=self.slot_mapping[begin:end],
            num_decodes=0,
            num_decode_tokens=0,
            num_prefills=0,
            num_prefill_tokens=0,
            query_start_loc_cpu=starts - begin,
            seq_lens_cpu=self.seq_lens_cpu[first:last],
        )
