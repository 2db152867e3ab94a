"""How does the library's own cache object keep its keys and values in pages?

A model that encodes and then decodes keeps two caches: one grows by a token a step, the other is
filled once from the encoder and read in every step. `PagedCache` is a cache object as the library
knows them: what a layer puts in is written to pages, and what the layer gets back has the right
shape but no numbers, only the way to the pages. A twin reads them through the block table; anything
else that tries to is refused.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...contract.attention_options import pack_options
from ...contract.metadata_classes import CommonAttentionMetadata
from ...contract.operations import Implementation
from ...tools.replay.block_manager import BlockManager
from ...validation.integrations import (
    check_paged_lengths,
    check_paged_spans,
    check_reorder,
    check_same_implementation,
    load_named,
    refuse_crop,
    refuse_reading,
)
from .masks import Sight, read_spans
from .pages import Pages

ASKED_OF_A_SHAPE = {
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


class KeysInPages(Tensor):
    """The shape of keys, or values, that lie in pages."""

    layer: "PagedLayer"

    @classmethod
    def of(cls, layer: "PagedLayer", like: Tensor, num_tokens: int) -> "KeysInPages":
        """Return a stand-in of shape [reqs, kv_heads, num_tokens, elements]."""
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
        """Answer what a shape can answer, and refuse the rest."""
        if func not in ASKED_OF_A_SHAPE:
            refuse_reading(getattr(func, "__name__", str(func)))
        if func is Tensor.__repr__:
            return "KeysInPages()"
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class _Rows:
    """The blocks that a cache's requests own, the same ones in every layer."""

    def __init__(
        self,
        run: Implementation,
        num_blocks: int,
        block_size: int,
        lengths: Sequence[int] | None,
    ) -> None:
        self.run = run
        self.manager = BlockManager(num_blocks, block_size)
        self.lengths = None if lengths is None else list(lengths)
        self.rows: list[list[int]] = []
        self._steps: dict[tuple[int, int], CommonAttentionMetadata] = {}

    def stored(self, num_reqs: int, num_tokens: int) -> list[int]:
        """Return how many of each request's first tokens are no padding."""
        if self.lengths is None:
            return [num_tokens] * num_reqs
        return [min(length, num_tokens) for length in self.lengths]

    def step(
        self, num_reqs: int, before: int, after: int, device: torch.device
    ) -> CommonAttentionMetadata:
        """Return the metadata of a write from one length to another; the rows grow with it."""
        if (before, after) not in self._steps:
            check_paged_lengths(self.lengths, self.rows, num_reqs)
            if not self.rows:
                self.rows = [[] for _ in range(num_reqs)]
            computed = self.stored(num_reqs, before)
            known = self.stored(num_reqs, after)
            for row, length in zip(self.rows, known, strict=True):
                needed = -(-length // self.manager.block_size)
                row += self.manager.allocate(max(0, needed - len(row)))
            self._steps = {
                (before, after): self.run.build_common_attn_metadata(
                    query_lens=[b - a for a, b in zip(computed, known, strict=True)],
                    num_computed_tokens=computed,
                    block_rows=self.rows,
                    block_size=self.manager.block_size,
                    device=device,
                )
            }
        return self._steps[before, after]

    def keep(self, indices: Sequence[int]) -> list[int]:
        """Keep some requests; return the blocks of the others, which are free now."""
        kept = set(indices)
        left = [row for index, row in enumerate(self.rows) if index not in kept]
        for row in left:
            self.manager.release(row)
        self.rows = [self.rows[index] for index in indices]
        if self.lengths is not None:
            self.lengths = [self.lengths[index] for index in indices]
        self._steps = {}
        return [block_id for row in left for block_id in row]


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `PagedCache`, as the library wants layers to be."""

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, rows: _Rows) -> None:
        self.is_initialized = False
        self._rows = rows
        self._length = 0
        self._pages: Pages | None = None
        self._shown: tuple[KeysInPages, KeysInPages] | None = None
        self._metadata: CommonAttentionMetadata | None = None

    @property
    def keys(self) -> KeysInPages | None:
        """[reqs, kv_heads, length, head_size] without numbers."""
        return None if self._shown is None else self._shown[0]

    @property
    def values(self) -> KeysInPages | None:
        """[reqs, kv_heads, length, value_head_size] without numbers."""
        return None if self._shown is None else self._shown[1]

    @property
    def pages(self) -> Pages:
        """The layer's cache."""
        assert self._pages is not None, "a layer without keys is asked for its pages"
        return self._pages

    @property
    def implementation(self) -> str:
        """The name of who writes the pages."""
        return self._rows.run.name

    @property
    def metadata(self) -> CommonAttentionMetadata:
        """Block table and lengths as they are after the last write."""
        assert self._metadata is not None, "a layer without keys is asked for its pages"
        return self._metadata

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the layer's pages."""
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
            args, kwargs: what else the library passes on; not needed.

        Returns:
            Stand-ins for all keys and values so far.

        Raises:
            OutOfBlocks: the cache is full.
            ValueError: another number of requests than before.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_reqs, _, num_new, _ = key_states.shape
        rows, before, after = self._rows, self._length, self._length + num_new
        step = rows.step(num_reqs, before, after, key_states.device)
        # step: leave out what is padding
        computed, known = rows.stored(num_reqs, before), rows.stored(num_reqs, after)
        new = [b - a for a, b in zip(computed, known, strict=True)]
        tokens = torch.tensor(
            [
                req * num_new + place
                for req, count in enumerate(new)
                for place in range(count)
            ],
            dtype=torch.int64,
            device=key_states.device,
        )
        # step: write the rest
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
        """Return stand-ins for all keys and values of so many requests."""
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

    def keep(self, left: Sequence[int]) -> None:
        """Forget blocks that were given back, after the rows have changed."""
        if self._pages is None:
            return
        self._pages.forget(left)
        rows = self._rows
        known = rows.stored(len(rows.rows), self._length)
        self._metadata = rows.run.build_common_attn_metadata(
            query_lens=[0] * len(known),
            num_computed_tokens=known,
            block_rows=rows.rows,
            block_size=rows.manager.block_size,
            device=self._pages.key_cache.device,
        )
        self._show(len(known))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys the next mask has, and the first one's position."""
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens so far, padding included."""
        return self._length

    def get_max_length(self) -> int:
        """Return -1: the pages are the limit, not a length."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1, under the name of earlier versions of the library."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each request the content of another one, as beam search asks for."""
        if self._pages is None:
            return
        order = beam_idx.tolist()
        check_reorder(self._rows.lengths, order)
        rows = self._rows.rows
        taken = torch.tensor([block for req in order for block in rows[req]])
        given = torch.tensor([block for row in rows for block in row])
        for cache in (self._pages.key_cache, self._pages.value_cache):
            cache[given.to(cache.device)] = cache[taken.to(cache.device)]

    def crop(self, *lengths: int) -> None:
        """Refuse: nobody could say what the blocks behind would hold."""
        refuse_crop()

    def reset(self) -> None:
        """Forget all tokens; the cache gives the blocks back."""
        self._length, self._shown, self._metadata = 0, None, None


class PagedCache(Cache):  # type: ignore[misc]
    """A cache object of the library whose keys and values lie in pages.

    It is for models whose attention is a registered twin. For an encoder-decoder model take two:
    `EncoderDecoderCache(PagedCache(...), PagedCache(...))`.

    Args:
        num_blocks: blocks in each layer's cache.
        block_size: slots in a block.
        implementation: "reference", "optimized", or the dotted name of a package with the same
            files: who writes.
        lengths: [reqs] tokens of each request that are no padding, which is all behind them; it
            gets no slot. None: there is none.

    Raises:
        ValueError: a number out of range, or an implementation that cannot be loaded.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        implementation: str = "optimized",
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.rows = _Rows(load_named(implementation), num_blocks, block_size, lengths)
        super().__init__(layer_class_to_replicate=partial(PagedLayer, self.rows))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some requests; the blocks of the others are free, and hold NaN."""
        left = self.rows.keep(indices.tolist())
        for layer in self.layers:
            layer.keep(left)

    def reset(self) -> None:
        """Forget all requests."""
        left = self.rows.keep([])
        for layer in self.layers:
            if layer.is_initialized:
                layer.pages.forget(left)
            layer.reset()


def attend_pages(
    run: Implementation,
    query: Tensor,
    key: KeysInPages,
    mask: Tensor | None,
    sight: Sight,
    options: dict[str, Any],
) -> Tensor:
    """Return what each query sees of its request's pages.

    Args:
        run: the implementation.
        query: [reqs, query_heads, query_len, head_size].
        key: the stand-in of the layer's keys.
        mask: which keys are no padding; None: all.
        sight: how positions decide.
        options: passed on to `paged_attention`.

    Returns:
        [reqs, query_len, query_heads, value_head_size].

    Raises:
        NotImplementedError: padding before a request's first key, or behind queries that are
            positions.
        ValueError: a mask that shows keys which are not in the pages, or pages of another
            implementation.
    """
    layer = key.layer
    check_same_implementation(layer.implementation, run.name)
    num_reqs, _, query_len, _ = query.shape
    key_len = layer.get_seq_length()
    spans = read_spans(mask, num_reqs, query_len, key_len, sight)
    seq_lens = check_paged_spans(
        spans.keys,
        spans.queries,
        layer.metadata.seq_lens_cpu.tolist(),
        query_len,
        sight.counts_positions,
        sight.sliding_window,
        sight.attention_chunk_size,
    )
    if not sight.causal:
        options = {**options, "causal": False}
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
        **pack_options(**options),
    )
    return out.view(num_reqs, query_len, *out.shape[1:])
