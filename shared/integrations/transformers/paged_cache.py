"""A cache object of the library whose keys and values are stored in pages.

An encoder-decoder model keeps two caches: one grows by a token per step, the other is filled once
from the encoder and read in every step. `PagedCache` is a cache object of the library. What a layer
passes to it is written to pages. What the layer gets back has the right shape and no data, but a
reference to the pages. A registered twin reads the pages through the block table. Any other read of
the returned tensors raises an error.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...bookkeeping.cache.block_manager import BlockManager
from ...contract.metadata_classes import CommonAttentionMetadata
from ...contract.operations import Implementation
from ...validation.integrations import (
    check_paged_lengths,
    check_paged_ranges,
    check_same_implementation,
    load_named,
    raise_on_crop,
    raise_on_read,
)
from .masks import VisibleRange, read_padded_ranges
from .pages import Pages

SHAPE_QUERIES = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.__len__,
    Tensor.__repr__,
}
"""Tensor functions that need no data."""


class KeysInPages(Tensor):
    """A tensor without data, of the shape of keys or values that are stored in pages."""

    layer: "PagedLayer"

    @classmethod
    def of(cls, layer: "PagedLayer", like: Tensor, num_tokens: int) -> "KeysInPages":
        """Return a tensor of shape [reqs, kv_heads, num_tokens, elements]."""
        reqs, heads, _, elements = like.shape
        empty = like.new_empty(()).expand(reqs, heads, num_tokens, elements)
        found = empty.as_subclass(cls)
        found.layer = layer
        return found

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run functions that need only the shape; raise for all others."""
        if func not in SHAPE_QUERIES:
            raise_on_read(getattr(func, "__name__", str(func)))
        if func is Tensor.__repr__:
            return "KeysInPages()"
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class _BlockRows:
    """The block-table rows of a cache's requests, the same in every layer.

    Args:
        run: the implementation that builds metadata.
        num_blocks: blocks in each layer's cache.
        block_size: slots per block.
        lengths: Optional. [reqs] tokens of each request that are stored. If None, all of them.
    """

    def __init__(
        self,
        run: Implementation,
        num_blocks: int,
        block_size: int,
        lengths: Sequence[int] | None,
    ) -> None:
        self.run = run
        # shuffled, so that no block table is 0, 1, 2, ... by chance
        self.manager = BlockManager(num_blocks, block_size, seed=0)
        self.lengths = None if lengths is None else list(lengths)
        self.blocks_to_copy: list[tuple[int, int]] = []
        """Copies that each layer makes before it writes the current step."""
        self._ids: list[int] = []
        self._new_ids = count()
        self._holding: set[int] = set()
        self._steps: dict[tuple[int, int], CommonAttentionMetadata] = {}

    @property
    def rows(self) -> list[list[int]]:
        """[reqs] block ids of each request."""
        return [
            self.manager.get_block_ids(each) if each in self._holding else []
            for each in self._ids
        ]

    def stored(self, num_reqs: int, num_tokens: int) -> list[int]:
        """Return how many of each request's first tokens are not padding."""
        if self.lengths is None:
            return [num_tokens] * num_reqs
        return [min(length, num_tokens) for length in self.lengths]

    def step(
        self, num_reqs: int, before: int, after: int, device: torch.device
    ) -> CommonAttentionMetadata:
        """Return the metadata of a write from one length to another; rows grow as needed."""
        if (before, after) not in self._steps:
            check_paged_lengths(self.lengths, self._ids, num_reqs)
            if not self._ids:
                self._ids = [next(self._new_ids) for _ in range(num_reqs)]
            computed = self.stored(num_reqs, before)
            known = self.stored(num_reqs, after)
            self.blocks_to_copy = []
            for request_id, first, end in zip(self._ids, computed, known, strict=True):
                if end > first:
                    allocation = self.manager.allocate_slots(
                        request_id, first, end - first
                    )
                    self._holding.add(request_id)
                    self.blocks_to_copy += allocation.blocks_to_copy
            self._steps = {(before, after): self.metadata(computed, known, device)}
        return self._steps[before, after]

    def metadata(
        self, computed: Sequence[int], known: Sequence[int], device: torch.device
    ) -> CommonAttentionMetadata:
        """Return the metadata of a step from some lengths to others."""
        metadata: CommonAttentionMetadata = self.run.build_common_attn_metadata(
            query_lens=[
                end - first for first, end in zip(computed, known, strict=True)
            ],
            num_computed_tokens=computed,
            block_rows=self.rows,
            block_size=self.manager.block_size,
            device=device,
        )
        return metadata

    def select(self, indices: Sequence[int]) -> list[int]:
        """Replace the requests by some of them; return the blocks that became free.

        Args:
            indices: for each new request the old one whose content it gets. Requests that occur
                several times share their blocks; blocks are copied when one of them is written.
        """
        before = {block_id for row in self.rows for block_id in row}
        selected = []
        for index in indices:
            parent_id, child_id = self._ids[index], next(self._new_ids)
            selected.append(child_id)
            if parent_id in self._holding:
                self.manager.fork(parent_id, child_id)
                self._holding.add(child_id)
        for request_id in self._ids:
            if request_id in self._holding:
                self.manager.free(request_id)
                self._holding.remove(request_id)
        self._ids, self._steps = selected, {}
        if self.lengths is not None:
            self.lengths = [self.lengths[index] for index in indices]
        return sorted(each for each in before if self.manager.ref_cnt(each) == 0)


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `PagedCache`, with the interface of the library's cache layers."""

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, rows: _BlockRows) -> None:
        self.is_initialized = False
        self._rows = rows
        self._length = 0
        self._pages: Pages | None = None
        self._shown: tuple[KeysInPages, KeysInPages] | None = None
        self._metadata: CommonAttentionMetadata | None = None

    @property
    def keys(self) -> KeysInPages | None:
        """[reqs, kv_heads, length, head_size] without data."""
        return None if self._shown is None else self._shown[0]

    @property
    def values(self) -> KeysInPages | None:
        """[reqs, kv_heads, length, value_head_size] without data."""
        return None if self._shown is None else self._shown[1]

    @property
    def pages(self) -> Pages:
        """The layer's key cache and value cache."""
        assert self._pages is not None, "update() has not been called"
        return self._pages

    @property
    def implementation(self) -> str:
        """Name of the implementation that writes the pages."""
        return self._rows.run.name

    @property
    def metadata(self) -> CommonAttentionMetadata:
        """Block table and lengths after the last write."""
        assert self._metadata is not None, "update() has not been called"
        return self._metadata

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the layer's pages."""
        manager = self._rows.manager
        key, value = (each.transpose(1, 2)[0] for each in (key_states, value_states))
        self._pages = Pages.like(key, value, manager.num_blocks, manager.block_size)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[KeysInPages, KeysInPages]:
        """Write new keys and values to their pages.

        Args:
            key_states: [reqs, kv_heads, new_tokens, head_size].
            value_states: [reqs, kv_heads, new_tokens, value_head_size].
            args, kwargs: further arguments of the library; not used.

        Returns:
            Tensors without data, of the shape of all keys and values so far.

        Raises:
            OutOfBlocks: the cache is full.
            ValueError: the number of requests has changed.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_reqs, _, num_new, _ = key_states.shape
        rows, before, after = self._rows, self._length, self._length + num_new
        step = rows.step(num_reqs, before, after, key_states.device)
        # step: copy shared blocks that are about to be written
        self.pages.copy_blocks(rows.blocks_to_copy)
        # step: leave out the padding
        computed, known = rows.stored(num_reqs, before), rows.stored(num_reqs, after)
        new = [end - first for first, end in zip(computed, known, strict=True)]
        tokens = torch.tensor(
            [
                req * num_new + index
                for req, num_tokens in enumerate(new)
                for index in range(num_tokens)
            ],
            dtype=torch.int64,
            device=key_states.device,
        )
        # step: write all other tokens
        key, value = (
            each.transpose(1, 2).flatten(0, 1)[tokens]
            for each in (key_states, value_states)
        )
        pages = self.pages
        rows.run.reshape_and_cache(
            key, value, pages.key_cache, pages.value_cache, step.slot_mapping
        )
        self._length, self._metadata = after, step
        return self._show(num_reqs)

    def _show(self, num_reqs: int) -> tuple[KeysInPages, KeysInPages]:
        """Return tensors without data, of the shape of all keys and values."""
        self._shown = tuple(  # type: ignore[assignment]
            KeysInPages.of(
                self,
                cache.new_empty(()).expand(num_reqs, cache.shape[2], 1, cache.shape[3]),
                self._length,
            )
            for cache in (self.pages.key_cache, self.pages.value_cache)
        )
        assert self._shown is not None
        return self._shown

    def rows_changed(self, freed: Sequence[int]) -> None:
        """Poison blocks that became free, and rebuild the metadata from the new rows."""
        if self._pages is None:
            return
        self._pages.poison(freed)
        known = self._rows.stored(len(self._rows.rows), self._length)
        self._metadata = self._rows.metadata(known, known, self._pages.key_cache.device)
        self._show(len(known))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys of the next mask, and the position of the first."""
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens so far, padding included."""
        return self._length

    def get_max_length(self) -> int:
        """Return -1: the number of blocks is the limit, not a length."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1; the name of `get_max_length` in earlier versions of the library."""
        return -1

    def crop(self, *lengths: int) -> None:
        """Raise NotImplementedError: blocks cannot be shortened."""
        raise_on_crop()

    def reset(self) -> None:
        """Forget all tokens; the cache frees the blocks."""
        self._length, self._shown, self._metadata = 0, None, None


class PagedCache(Cache):  # type: ignore[misc]
    """A cache object of the library whose keys and values are stored in pages.

    It is for models whose attention is a registered twin. An encoder-decoder model takes two:
    `EncoderDecoderCache(PagedCache(...), PagedCache(...))`.

    Args:
        num_blocks: blocks in each layer's cache.
        block_size: slots per block.
        implementation: "reference", "optimized", or the dotted name of a package with the same
            operations. It writes the pages.
        lengths: Optional. [reqs] tokens of each request that are stored; the tokens after them are
            padding and get no slot. If None, all tokens are stored.

    Raises:
        ValueError: a number is out of range, or the implementation cannot be loaded.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        implementation: str = "optimized",
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.rows = _BlockRows(
            load_named(implementation), num_blocks, block_size, lengths
        )
        super().__init__(layer_class_to_replicate=partial(PagedLayer, self.rows))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some requests; the blocks of the others are freed and filled with NaN."""
        self._select(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each request the content of another one, for beam search; blocks are shared."""
        self._select(beam_idx)

    def _select(self, indices: Tensor) -> None:
        freed = self.rows.select(indices.tolist())
        for layer in self.layers:
            layer.rows_changed(freed)

    def reset(self) -> None:
        """Forget all requests."""
        freed = self.rows.select([])
        for layer in self.layers:
            if layer.is_initialized:
                layer.pages.poison(freed)
            layer.reset()


def attend_pages(
    run: Implementation,
    query: Tensor,
    key: KeysInPages,
    mask: Tensor | None,
    visible: VisibleRange,
    arguments: dict[str, Any],
) -> Tensor:
    """Return the attention of each query with the pages of its request.

    Args:
        run: the implementation.
        query: [reqs, query_heads, query_len, head_size].
        key: the layer's keys, without data.
        mask: Optional. The mask of the library, which says which keys are padding. If None, no
            key is.
        visible: the visible range of the layer.
        arguments: further arguments of `paged_attention`.

    Returns:
        [reqs, query_len, query_heads, value_head_size].

    Raises:
        NotImplementedError: there is padding before a request's first key, or after queries whose
            position matters.
        ValueError: the mask shows keys that are not stored, or the pages are those of another
            implementation.
    """
    layer = key.layer
    check_same_implementation(layer.implementation, run.name)
    num_reqs, _, query_len, _ = query.shape
    key_len = layer.get_seq_length()
    ranges = read_padded_ranges(mask, num_reqs, query_len, key_len, visible)
    seq_lens = check_paged_ranges(
        ranges.keys,
        ranges.queries,
        layer.metadata.seq_lens_cpu.tolist(),
        query_len,
        visible.depends_on_position,
        visible.sliding_window,
        visible.attention_chunk_size,
    )
    pages = layer.pages
    device = query.device
    out: Tensor = run.paged_attention(
        query.transpose(1, 2).flatten(0, 1),
        pages.key_cache,
        pages.value_cache,
        layer.metadata.block_table_tensor,
        torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * query_len,
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        query_len,
        max(seq_lens, default=0),
        **arguments,
    )
    return out.view(num_reqs, query_len, *out.shape[1:])
