"""One layer of a `PagedCache`: its pages, the keys written to them, and attention over them.

What a layer gets back from the cache has the right shape and no data, but a reference to the pages.
A registered twin reads the pages through the block table. Any other read of the returned tensors
raises an error.

The keys are written when the layer computes attention, because the attention mask says which of
them are padding.
"""

import weakref
from collections.abc import Sequence
from functools import partialmethod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from ....contract.cache_formats import PLAIN, CacheFormat
from ....contract.operations import Implementation
from ....validation.library_caches import (
    check_in_turn,
    check_owner,
    raise_on_one_layer,
    raise_on_read,
)
from ....validation.library_masks import check_same_mask
from ..masks import (
    PaddedColumns,
    VisibleRange,
    bool_mask,
    last_positions,
    ragged_rows,
    remembered,
)
from ..models.compiled import outside_of_compiler
from ..models.dtypes import in_one_dtype
from ..pages import Pages, with_scales
from .block_rows import BlockRows, Contents
from .no_data import TensorWithoutData


class KeysInPages(TensorWithoutData):
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
    def reject(cls, operation: str) -> NoReturn:
        """Raise for a computation that needs the keys or the values."""
        raise_on_read(operation)


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `PagedCache`, with the interface of the library's cache layers."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(
        self, rows: BlockRows, layers: list["PagedLayer"], form: CacheFormat = PLAIN
    ) -> None:
        self.is_initialized = False
        self._form = form
        self._rows = rows
        self._layers = layers
        self._length = 0
        self._pages: Pages | None = None
        self._shown: tuple[KeysInPages, KeysInPages] | None = None
        self._contents: Contents | None = None
        self._pending: tuple[Tensor, Tensor] | None = None
        """Keys and values that are not written yet."""
        self._owner: weakref.ref[nn.Module] | None = None
        """The attention module that writes the pages."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied and pickled. A copy belongs to the next model that writes it."""
        return {**self.__dict__, "_shown": None, "_owner": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy."""
        self.__dict__.update(state)
        if self._contents is not None:
            self._show(len(self._contents.is_token))

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
    def contents(self) -> Contents:
        """What the pages hold."""
        assert self._contents is not None, "nothing has been written"
        return self._contents

    @property
    def number(self) -> int:
        """Index of the layer in the cache."""
        return next(i for i, layer in enumerate(self._layers) if layer is self)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the layer's pages."""
        manager = self._rows.manager
        key, value = (
            states.transpose(1, 2)[0] for states in (key_states, value_states)
        )
        blocks = (manager.num_blocks, manager.block_size)
        self._pages = Pages.like(
            key, value, *blocks, self._form, "a layer of PagedCache"
        )
        self.is_initialized = True

    @outside_of_compiler
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[KeysInPages, KeysInPages]:
        """Take new keys and values; they are written when the layer computes attention.

        Args:
            key_states: [reqs, kv_heads, new_tokens, head_size].
            value_states: [reqs, kv_heads, new_tokens, value_head_size].
            args, kwargs: further arguments of the library; not used.

        Returns:
            Tensors without data, of the shape of all keys and values so far.

        Raises:
            TypeError: keys and values have different dtypes.
            ValueError: the number of requests has changed, a run of the model ended before its
                last layer, or the cache format does not take its head size.
        """
        num_reqs, _, num_new, _ = key_states.shape
        self._rows.check_requests(num_reqs)
        self._check_in_turn(num_new)
        key_states, value_states = in_one_dtype(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._pending = key_states, value_states
        self._length += num_new
        self._show(num_reqs)
        assert self._shown is not None
        return self._shown

    def _check_in_turn(self, num_new: int) -> None:
        """Raise ValueError if this layer or another one has missed a write."""
        known, written = self._rows.num_columns, self._rows.contents
        # whether another layer has written the columns of this run
        is_begun = written is not None and num_new == written.num_new
        if is_begun and self._pending is None and self._length == known - num_new:
            return
        for layer in (*self._layers, self):
            if layer.is_initialized or layer is self:
                check_in_turn(layer.number, layer.get_seq_length(), known)

    def write(
        self,
        module: nn.Module,
        query_len: int,
        mask: Tensor | None,
        visible: VisibleRange,
    ) -> PaddedColumns:
        """Write the new keys and values to their pages, and return what is computed.

        Args:
            module: the attention module.
            query_len: queries of each request.
            mask: Optional. The mask of the library, which says which columns are padding. If
                None, no column is.
            visible: the visible range of the layer.

        Raises:
            NotImplementedError: the mask contains more than padding and `visible`.
            OutOfBlocks: the cache is full.
            ValueError: the pages are those of another model.
        """
        if self._pending is None:
            _, columns = self._read_mask(0, query_len, mask, visible)
            return columns
        key, value = self._pending
        num_new = key.shape[2]
        try:
            name = type(module).__name__
            is_owner = self._owner is None or self._owner() is module
            check_owner("PagedCache", self.number, name, is_owner)
            tokens, columns = self._read_mask(num_new, query_len, mask, visible)
            if self._rows.num_columns == self._length:
                contents = self._rows.same_step(tokens)
            else:
                contents = self._rows.extend(tokens, key.device)
        except Exception:
            self._pending, self._length = None, self._length - num_new
            self._show(len(key))
            raise
        self._store(key, value, contents)
        self._pending, self._contents = None, contents
        self._owner = weakref.ref(module)
        return columns

    def _read_mask(
        self, num_new: int, query_len: int, mask: Tensor | None, visible: VisibleRange
    ) -> tuple[Tensor, PaddedColumns]:
        """Return the new columns that are tokens, and the columns that are computed.

        Args:
            num_new: columns that are not written yet.
            query_len, mask, visible: as in `write`.
        """
        rows, key_len = self._rows, self._length
        assert self._shown is not None
        num_reqs = self._shown[0].shape[0]
        shown = None
        if mask is not None:
            shown = bool_mask(mask, num_reqs, query_len, key_len)

        def read() -> tuple[Tensor, PaddedColumns]:
            # step: find the new columns that are tokens
            first = key_len - num_new
            tokens = torch.ones(num_reqs, num_new, dtype=torch.bool)
            if rows.lengths is not None:
                column = torch.arange(first, key_len)
                tokens = column < torch.tensor(rows.lengths)[:, None]
            elif shown is not None and num_new:
                is_self = visible.causal and query_len == num_new
                # a token attends to itself; an encoder's token is attended to by any query
                seen = (
                    shown.diagonal(first, 1, 2) if is_self else shown.any(1)[:, first:]
                )
                tokens = seen.cpu()
            # step: find the queries that are tokens: the last columns, or those of a decoder
            keys = torch.cat([rows.flags(num_reqs)[:, :first], tokens], 1)
            queries = torch.ones(num_reqs, query_len, dtype=torch.bool)
            if visible.causal:
                queries = keys[:, key_len - query_len :]
            # step: build the mask that those columns mean, and compare
            if shown is not None:
                positions = last_positions(queries, keys.sum(1))
                expected = visible.mask(keys, positions).to(shown.device)
                on_device = queries.to(shown.device)
                check_same_mask(shown, expected, on_device, visible.causal)
            return tokens, PaddedColumns(queries, keys)

        if mask is None:
            return read()
        # what the rows hold does not change without new contents
        key = (visible, num_reqs, query_len, num_new, rows, rows.contents)
        return remembered(mask, key, read)

    def _store(self, key: Tensor, value: Tensor, contents: Contents) -> None:
        """Write the tokens of the last columns to their slots."""
        # step: copy shared blocks that are about to be written
        self.pages.copy_blocks(contents.blocks_to_copy)
        # step: leave out the padding, and write all other tokens
        tokens, _, _ = ragged_rows(contents.new_tokens, key.device)
        flat_key, flat_value = (
            states.transpose(1, 2).flatten(0, 1)[tokens] for states in (key, value)
        )
        pages = self.pages
        self._rows.run.reshape_and_cache(
            flat_key,
            flat_value,
            pages.key_cache,
            pages.value_cache,
            contents.metadata.slot_mapping,
            **pages.of_write,
        )

    def _show(self, num_reqs: int) -> None:
        """Keep tensors without data, of the shape of all keys and values."""
        pages = self.pages
        empty = pages.key_cache.new_empty((), dtype=pages.dtype)
        heads = pages.key_cache.shape[2]
        key, value = (
            KeysInPages.of(self, empty.expand(num_reqs, heads, 1, size), self._length)
            for size in pages.head_sizes
        )
        self._shown = key, value

    def rows_changed(self, freed: Sequence[int] = ()) -> None:
        """Take over the rows that all layers share; poison blocks that became free."""
        contents = self._rows.contents
        if self._pages is None or contents is None:
            return
        self._pages.poison(freed)
        self._contents, self._length = contents, contents.num_columns
        self._show(len(contents.is_token))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys of the next mask, and the position of the first."""
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the columns so far, padding included."""
        return self._length

    def get_max_length(self) -> int:
        """Return -1: the number of blocks is the limit, not a length."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1; the name of `get_max_length` in earlier versions of the library."""
        return -1

    def forget(self, freed: Sequence[int]) -> None:
        """Forget all tokens, and the model; poison the blocks that became free."""
        if self._pages is not None:
            self._pages.poison(freed)
        self._length, self._shown, self._contents = 0, None, None
        self._pending, self._owner = None, None

    def _reject(self, operation: str, *_: Any) -> None:
        """Raise TypeError: all layers of a cache change at once."""
        raise_on_one_layer(operation)

    crop = partialmethod(_reject, "crop")
    reset = partialmethod(_reject, "reset")
    reorder_cache = partialmethod(_reject, "reorder_cache")
    batch_select_indices = partialmethod(_reject, "batch_select_indices")
    batch_repeat_interleave = partialmethod(_reject, "batch_repeat_interleave")


def attend_pages(
    run: Implementation,
    query: Tensor,
    layer: PagedLayer,
    columns: PaddedColumns,
    arguments: dict[str, Any],
) -> Tensor:
    """Return the attention of each query with the pages of its request; padding gives 0.

    Args:
        run: the implementation.
        query: [reqs, query_heads, query_len, head_size].
        layer: the layer that wrote the pages.
        columns: the columns that are computed.
        arguments: further arguments of `paged_attention`.

    Returns:
        [reqs, query_len, query_heads, value_head_size].
    """
    num_reqs, query_heads, query_len, _ = query.shape
    pages, device = layer.pages, query.device
    # step: remove the padding, so that the batch is ragged
    rows, query_start_loc, max_query_len = ragged_rows(columns.queries, device)
    seq_lens = columns.keys.sum(1)
    # step: compute attention
    ragged = run.paged_attention(
        query.transpose(1, 2).flatten(0, 1)[rows],
        pages.key_cache,
        pages.value_cache,
        layer.contents.metadata.block_table_tensor,
        query_start_loc,
        seq_lens.to(device, torch.int32),
        max_query_len,
        max(seq_lens.tolist(), default=0),
        **with_scales(arguments, pages),
    )
    # step: insert the padding again
    out = query.new_zeros(num_reqs * query_len, query_heads, pages.head_sizes[1])
    out[rows] = ragged
    return out.view(num_reqs, query_len, *out.shape[1:])
