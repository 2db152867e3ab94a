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

from .checks import (
    check_cross_fields,
    check_encoder_starts,
    check_tree_is_whole,
)
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
        causal: a query sees the keys up to its own position; [reqs] bool: it does where the flag
            of its request is set.
        logits_indices_padded: [logits] tokens whose logits are wanted, rising; entries from
            `num_logits_indices` on are padding.
        num_logits_indices: how many of them count; None: not known, as there are none.
        max_logits_per_req: an upper bound on the wanted logits of one request.
        encoder_seq_lens, encoder_seq_lens_cpu: [reqs] tokens of each request's encoder, for
            cross-attention; 0 where it has none.
        max_encoder_seq_len: an upper bound on them; None: the longest of them.
        encoder_query_start_loc, encoder_query_start_loc_cpu: [reqs + 1] where the tokens start
            that each request's encoder computes in this step. Encoders are computed once, so
            these are all of a request's or none: a decode brings none.
        cross_block_table_tensor: [reqs, max_blocks] where the encoders' keys and values lie.
        cross_slot_mapping: [encoder tokens] slot of every token that an encoder computes in this
            step; None or empty: none does.
        dcp_local_seq_lens, dcp_local_seq_lens_cpu: [reqs] the keys of each sequence that this
            rank of a decode context parallel group holds.
        positions: [tokens] position of every new token in its sequence.
        is_prefilling: [reqs] on the host: the request has not computed its whole prompt yet.
        mm_req_doc_ranges: for each request that has images, their spans: first and last
            position; within a span tokens see each other both ways.
        tree_mask: [reqs, tree, tree] which new token sees which, where a request verifies
            several drafts at once; requests that bring more tokens than `tree` are causal.
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
    causal: bool | Tensor = True
    logits_indices_padded: Tensor | None = None
    num_logits_indices: int | None = None
    max_logits_per_req: int | None = None
    encoder_seq_lens: Tensor | None = None
    encoder_seq_lens_cpu: Tensor | None = None
    max_encoder_seq_len: int | None = None
    encoder_query_start_loc: Tensor | None = None
    encoder_query_start_loc_cpu: Tensor | None = None
    cross_block_table_tensor: Tensor | None = None
    cross_slot_mapping: Tensor | None = None
    dcp_local_seq_lens: Tensor | None = None
    dcp_local_seq_lens_cpu: Tensor | None = None
    positions: Tensor | None = None
    is_prefilling: Tensor | None = None
    mm_req_doc_ranges: Mapping[int, Sequence[tuple[int, int]]] | None = None
    tree_mask: Tensor | None = None

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
    "causal",
    "seq_lens",
    "seq_lens_cpu",
    "num_computed_tokens_cpu",
    "block_table_tensor",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "cross_block_table_tensor",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu",
    "is_prefilling",
    "tree_mask",
)
FIELDS_PER_TOKEN = ("slot_mapping", "positions")
FIELDS_CARRIED = ("max_logits_per_req", "max_encoder_seq_len")
FIELDS_CUT_BY_HAND = (
    "query_start_loc",
    "query_start_loc_cpu",
    "num_reqs",
    "num_actual_tokens",
    "max_query_len",
    "max_seq_len",
    "logits_indices_padded",
    "num_logits_indices",
    "encoder_query_start_loc",
    "encoder_query_start_loc_cpu",
    "cross_slot_mapping",
    "mm_req_doc_ranges",
)


def cut_fields(
    metadata: CommonAttentionMetadata, request_slice: slice, token_slice: slice
) -> dict[str, Any]:
    """Return the fields that have an entry for each request or token, cut to some of them.

    What a request's encoder computes in the step stays with the request's first token: whoever
    takes only later ones reads what is in the cache by then.

    Args:
        metadata: the batch.
        request_slice, token_slice: what is kept, as start and stop.

    Returns:
        Views by field name; the keys of `mm_req_doc_ranges` count from the first kept request.

    Raises:
        ValueError: `cross_slot_mapping` without the starts by which it is cut.
        NotImplementedError: a request that is cut while `tree_mask` is set.
    """
    cut: dict[str, Any] = {}
    first, last = request_slice.start, request_slice.stop
    starts = metadata.query_start_loc_cpu
    is_begun = first < last and token_slice.start > int(starts[first])
    is_open = first < last and token_slice.stop < int(starts[last])
    if metadata.tree_mask is not None:
        check_tree_is_whole(is_begun, is_open)
    for names, kept in (
        (FIELDS_PER_REQUEST, request_slice),
        (FIELDS_PER_TOKEN, token_slice),
    ):
        for name in names:
            value = getattr(metadata, name)
            # `causal` may be one flag for all
            cut[name] = value[kept] if isinstance(value, Tensor) else value
    cut |= cut_encoder_tokens(metadata, first, last, is_begun)
    if metadata.mm_req_doc_ranges is not None:
        cut["mm_req_doc_ranges"] = {
            req - first: ranges
            for req, ranges in metadata.mm_req_doc_ranges.items()
            if first <= req < last
        }
    return cut


def cut_encoder_tokens(
    metadata: Any, first: int, last: int, is_begun: bool
) -> dict[str, Any]:
    """Return what the encoders of some requests compute in the step, counted from 0.

    Args:
        metadata: the step.
        first, last: the requests, the last one left out.
        is_begun: the first request's encoder was computed before.

    Returns:
        The starts on both sides and `cross_slot_mapping`; nothing if no encoder is computed.

    Raises:
        ValueError: slots without starts.
    """
    check_encoder_starts(metadata)
    starts = metadata.encoder_query_start_loc_cpu
    if starts is None:
        return {}
    begin, end = int(starts[first + is_begun]), int(starts[last])
    slots = metadata.cross_slot_mapping
    cut = {"cross_slot_mapping": None if slots is None else slots[begin:end]}
    for name in ("encoder_query_start_loc", "encoder_query_start_loc_cpu"):
        cut[name] = getattr(metadata, name)[first : last + 1].clamp(min=begin) - begin
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
        causal: whether a query sees no further than itself; [reqs] bool: for each request.
        tree_mask: [reqs, tree, tree] which new token sees which; None: there is no tree.
        query_ranges: [tokens, 2] int32 first and last position of the image that a token stands
            in, (-1, -1) outside of all; None: no token stands in one.
        encoder_seq_lens, encoder_seq_lens_cpu, max_encoder_seq_len: the keys of cross-attention.
        encoder_query_start_loc, encoder_query_start_loc_cpu: [reqs + 1] where the tokens start
            that encoders compute in this step.
        cross_block_table: [reqs, max_blocks] where the encoders' keys lie.
        cross_slot_mapping: [encoder tokens] where those of this step go.
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
    causal: bool | Tensor = True
    tree_mask: Tensor | None = None
    query_ranges: Tensor | None = None
    encoder_seq_lens: Tensor | None = None
    encoder_seq_lens_cpu: Tensor | None = None
    max_encoder_seq_len: int | None = None
    encoder_query_start_loc: Tensor | None = None
    encoder_query_start_loc_cpu: Tensor | None = None
    cross_block_table: Tensor | None = None
    cross_slot_mapping: Tensor | None = None

    @cached_property
    def cross_metadata(self) -> "PagedAttentionMetadata":
        """The step as cross-attention sees it: the same queries, the encoders' keys.

        Every query sees all of them, as their positions are those of another sequence.

        Raises:
            ValueError: the step does not say where the encoders' keys lie.
        """
        check_cross_fields(self)
        encoders: dict[str, Any] = {
            "seq_lens": self.encoder_seq_lens,
            "seq_lens_cpu": self.encoder_seq_lens_cpu,
            "max_seq_len": self.max_encoder_seq_len,
            "block_table": self.cross_block_table,
        }
        return replace(
            self, **encoders, causal=False, tree_mask=None, query_ranges=None
        )

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
        cut = {name: getattr(self, name) for name in PART_FIELDS_PER_REQUEST}
        lens = self.encoder_seq_lens_cpu
        # a part has no parts, so its counters are 0
        return replace(
            self,
            # `causal` may be one flag for all
            **{
                name: value[first:last] if isinstance(value, Tensor) else value
                for name, value in cut.items()
            },
            **cut_encoder_tokens(self, first, last, is_begun=False),
            max_encoder_seq_len=None if lens is None else int(lens[first:last].max()),
            query_ranges=_none_or_rows(self.query_ranges, begin, end),
            num_actual_tokens=end - begin,
            max_query_len=int(starts.diff().max()),
            query_start_loc=self.query_start_loc[first : last + 1] - begin,
            max_seq_len=int(self.seq_lens_cpu[first:last].max()),
            slot_mapping=self.slot_mapping[begin:end],
            num_decodes=0,
            num_decode_tokens=0,
            num_prefills=0,
            num_prefill_tokens=0,
            query_start_loc_cpu=starts - begin,
        )


PART_FIELDS_PER_REQUEST = (
    "seq_lens",
    "seq_lens_cpu",
    "block_table",
    "causal",
    "tree_mask",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "cross_block_table",
)


def _none_or_rows(tensor: Tensor | None, begin: int, end: int) -> Tensor | None:
    return None if tensor is None else tensor[begin:end]
