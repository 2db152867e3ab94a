"""A cache object of the library whose keys and values are stored in pages.

An encoder-decoder model keeps two caches: one grows by a token per step, the other is filled once
from the encoder and read in every step. `PagedCache` is a cache object of the library. What a layer
passes to it is written to pages, and its attention reads them through a block table.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...validation.integrations import load_named, read_count, read_ids
from ...validation.library_caches import (
    check_crop,
    check_in_turn,
    check_lengths,
    check_request_indices,
)
from ...validation.library_formats import read_cache_format
from .steps.block_rows import BlockRows
from .steps.paged_layer import PagedLayer


class PagedCache(Cache):  # type: ignore[misc]
    """A cache object of the library whose keys and values are stored in pages.

    It is for models whose attention is a registered twin, and for one model at a time. An
    encoder-decoder model takes two: `EncoderDecoderCache(PagedCache(...), PagedCache(...))`.

    Prompts may be padded on either side; padding gets no slot. A deep copy is independent of the
    original.

    Args:
        num_blocks: blocks in each layer's cache.
        block_size: slots per block.
        implementation: "reference", "optimized", or the dotted name of a package with the same
            operations. It writes the pages.
        lengths: Optional. [reqs] tokens of each request that are stored; the tokens after them are
            padding. If None, the attention mask says which tokens are padding.
        cache_format: name of the format of all layers' pages. Given scales, as those of an FP8
            cache and the global ones of nvfp4, are 1.

    Raises:
        TypeError: a number is not an integer.
        ValueError: a number is out of range, the implementation cannot be loaded, or no format has
            that name.
    """

    layers: list[PagedLayer]

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        implementation: str = "optimized",
        lengths: Sequence[int] | None = None,
        cache_format: str = "auto",
    ) -> None:
        form = read_cache_format(cache_format)
        self.rows = BlockRows(
            load_named(implementation),
            read_count("num_blocks", num_blocks),
            read_count("block_size", block_size),
            None if lengths is None else check_lengths(read_ids("lengths", lengths)),
        )
        layers: list[PagedLayer] = []
        super().__init__(
            layer_class_to_replicate=partial(PagedLayer, self.rows, layers, form)
        )
        self.layers = layers

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Keep some requests; the blocks of the others are freed and filled with NaN.

        Args:
            indices: the requests that stay, or a bool tensor that is True for them.
        """
        if isinstance(indices, Tensor) and indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._select(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each request the content of another one, for beam search; blocks are shared."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each request; blocks are shared, and copied when one of them is written."""
        repeats = read_count("repeats", repeats)
        known = range(self.rows.num_requests)
        self._select([index for index in known for _ in range(repeats)])

    def _select(self, indices: Tensor | Sequence[int]) -> None:
        numbers = read_ids("indices", indices)
        if self._check_whole():
            known = self.rows.num_requests
            check_request_indices(numbers, known)
            device = self.layers[-1].pages.key_cache.device
            freed = self.rows.select([index % known for index in numbers], device)
            for layer in self.layers:
                layer.rows_changed(freed)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns of every request, as assisted decoding does.

        Args:
            tokens_to_remove: minus the number of columns to forget. Earlier versions of the
                library pass the length that remains, a positive number.
        """
        (number,) = read_ids("tokens_to_remove", [tokens_to_remove])
        length = self.rows.num_columns
        num_removed = -number if number <= 0 else max(0, length - number)
        check_crop(num_removed, length)
        if self._check_whole() and num_removed:
            device = self.layers[-1].pages.key_cache.device
            self.rows.crop(length - num_removed, device)
            for layer in self.layers:
                layer.rows_changed()

    def _check_whole(self) -> bool:
        """Return whether anything is stored; raise if a run ended before its last layer."""
        for layer in self.layers:
            if layer.is_initialized:
                check_in_turn(
                    layer.number, layer.get_seq_length(), self.rows.num_columns
                )
        return self.rows.contents is not None

    def reset(self) -> None:
        """Forget all requests, and the model."""
        freed = self.rows.reset()
        for layer in self.layers:
            layer.forget(freed)
