"""Metadata classes of a step: the common one, a backend's, and a micro-batch's slice.

A step computes a batch of requests at once. Their new tokens are concatenated in one tensor. The
metadata holds where each request starts, how long its sequence is, and where its keys and values
are stored.
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

    Tensors whose name ends in `_cpu` are copies on the host, for planning without a
    synchronization. The others are on the device of the cache.

    Args:
        query_start_loc: [reqs + 1] start of each request's new tokens. The last entry is their
            total.
        seq_lens: [reqs] tokens of each sequence in the cache after this step's cache write.
        num_computed_tokens_cpu: [reqs] tokens that were in the cache before the step.
        num_reqs: requests in the batch.
        num_actual_tokens: new tokens in the batch, padding not counted.
        max_query_len: an upper bound on the new tokens of one request.
        max_seq_len: an upper bound on `seq_lens`.
        block_table_tensor: [reqs, max_blocks] block ids; entries past a row's end are never read.
        slot_mapping: [tokens] slot of every new token, or PAD_SLOT_ID.
        causal: whether a query attends only to keys up to its own position: one bool, or [reqs]
            bool per request.
        logits_indices_padded: Optional. [logits] tokens whose logits are wanted, in rising
            order. Entries from `num_logits_indices` on are padding.
        num_logits_indices: Optional. Number of wanted tokens. None if there are none.
        max_logits_per_req: Optional. An upper bound on the wanted logits of one request.
        encoder_seq_lens, encoder_seq_lens_cpu: Optional. [reqs] tokens of each request's encoder,
            for cross-attention; 0 for a request without one.
        max_encoder_seq_len: Optional. An upper bound on them. If None, their maximum.
        encoder_query_start_loc, encoder_query_start_loc_cpu: Optional. [reqs + 1] start of the
            tokens that each request's encoder computes in this step. Encoders run once, so these
            are all tokens of a request or none; a decode has none.
        cross_block_table_tensor: Optional. [reqs, max_blocks] blocks of the encoders' keys and
            values.
        cross_slot_mapping: Optional. [encoder tokens] slot of every token that an encoder
            computes in this step. None or empty if there are none.
        dcp_local_seq_lens, dcp_local_seq_lens_cpu: Optional. [reqs] number of keys of each
            sequence on this rank of a decode context parallel group.
        positions: Optional. [tokens] position of every new token in its sequence.
        is_prefilling: Optional. [reqs] on the host: whether a request is within its prompt.
        mm_req_doc_ranges: Optional. Ranges of the images per request: first and last position.
            Tokens within a range attend to each other in both directions.
        tree_mask: Optional. [reqs, tree, tree] visibility among new tokens, for requests that
            verify a tree of draft tokens. Requests with more new tokens than `tree` are causal.
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
        """`seq_lens_cpu` under vLLM's newer name; the bound is exact."""
        return self.seq_lens_cpu

    def batch_size(self) -> int:
        """Return the number of requests in the tensors, padding included."""
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

        A token after the last request gets the number of requests.
        """
        ends = self.query_start_loc[1:]
        tokens = torch.arange(
            self.num_actual_tokens, dtype=ends.dtype, device=ends.device
        )
        return torch.bucketize(tokens, ends, out_int32=True, right=True)

    def replace(self, **changes: Any) -> "CommonAttentionMetadata":
        """Return a copy with some fields changed and without cached properties."""
        return replace(self, **changes)

    def unpadded(
        self, num_actual_tokens: int, num_actual_reqs: int
    ) -> "CommonAttentionMetadata":
        """Return the first requests and tokens, without the padding after them.

        Args:
            num_actual_tokens: tokens to keep.
            num_actual_reqs: requests to keep; all of their tokens are kept.

        Raises:
            IndexError: the batch has fewer.
        """
        for name, count, there in (
            ("num_actual_reqs", num_actual_reqs, self.num_reqs),
            ("num_actual_tokens", num_actual_tokens, self.slot_mapping.shape[0]),
        ):
            if not 0 <= count <= there:
                raise IndexError(f"{name} = {count}: expected 0 to {there}")
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


# How each field of CommonAttentionMetadata is handled when a batch is sliced. Every field is in
# exactly one of these tuples; a test enforces it, so that a new field cannot be forgotten.
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
    """Return the fields that have an entry per request or token, sliced.

    The tokens that a request's encoder computes in the step belong to the slice with the request's
    first token. A slice with later tokens reads them from the cache.

    Args:
        metadata: the batch.
        request_slice, token_slice: requests and tokens to keep, with start and stop.

    Returns:
        Views by field name. The keys of `mm_req_doc_ranges` are relative to the first request.

    Raises:
        ValueError: `cross_slot_mapping` is given without its starts.
        NotImplementedError: a request is cut and `tree_mask` is set.
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
            # `causal` may be one flag for all requests
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
    """Return the encoder tokens of some requests, with starts relative to the first.

    Args:
        metadata: the step.
        first, last: the requests, `last` exclusive.
        is_begun: whether the first request's encoder was computed before.

    Returns:
        The starts on host and device and `cross_slot_mapping`; empty if no encoder is computed.

    Raises:
        ValueError: slots are given without starts.
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
    """One micro-batch of a step: its requests and its tokens.

    Args:
        request_slice: requests, those that are cut included.
        token_slice: new tokens, indexed over the whole batch.
    """

    request_slice: slice
    token_slice: slice

    @property
    def num_tokens(self) -> int:
        return int(self.token_slice.stop - self.token_slice.start)


@dataclass(frozen=True, kw_only=True)
class PagedAttentionMetadata:
    """One step's batch in the form of a backend: decodes first, then prefills.

    Args:
        num_actual_tokens: new tokens, padding not counted.
        max_query_len, max_seq_len: upper bounds on the host. A captured graph keeps them, so they
            must hold for every replay.
        query_start_loc: [reqs + 1], on the device of the cache.
        seq_lens: [reqs].
        block_table: [reqs, max_blocks].
        slot_mapping: [tokens].
        num_decodes, num_decode_tokens: number of decodes, which come first, and their tokens.
        num_prefills, num_prefill_tokens: number of prefills and their tokens.
        query_start_loc_cpu, seq_lens_cpu: copies on the host, for planning.
        causal: whether a query attends only to keys up to its own position: one bool, or [reqs]
            bool per request.
        tree_mask: Optional. [reqs, tree, tree] visibility among new tokens.
        query_ranges: Optional. [tokens, 2] int32 first and last position of the image that
            contains a token, (-1, -1) for tokens outside all images.
        encoder_seq_lens, encoder_seq_lens_cpu, max_encoder_seq_len: Optional. Lengths of the keys
            of cross-attention.
        encoder_query_start_loc, encoder_query_start_loc_cpu: Optional. [reqs + 1] start of the
            tokens that encoders compute in this step.
        cross_block_table: Optional. [reqs, max_blocks] blocks of the encoders' keys.
        cross_slot_mapping: Optional. [encoder tokens] slots of this step's encoder tokens.
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
        """The step for cross-attention: the same queries with the encoders' keys.

        Every query attends to all keys of its encoder.

        Raises:
            ValueError: the metadata has no lengths or blocks of the encoders' keys.
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
        """The decodes; None if they have no token."""
        return self._part(0, self.num_decodes) if self.num_decode_tokens else None

    @cached_property
    def prefill_metadata(self) -> "PagedAttentionMetadata | None":
        """The prefills, with starts relative to the first; None if there are none."""
        if not self.num_prefills:
            return None
        return self._part(self.num_decodes, self.num_decodes + self.num_prefills)

    def _part(self, first: int, last: int) -> "PagedAttentionMetadata":
        starts = self.query_start_loc_cpu[first : last + 1]
        begin, end = int(starts[0]), int(starts[-1])
        cut = {name: getattr(self, name) for name in PART_FIELDS_PER_REQUEST}
        lens = self.encoder_seq_lens_cpu
        # a slice is not split again, so its counters are 0
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
