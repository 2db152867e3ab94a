"""The paged KV cache of one layer of a model, in any cache format."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...contract.cache_formats import PLAIN, CacheFormat, head_size_of
from ...validation.library_formats import check_format_heads

NAN_BYTE = 0xFF
"""A byte that is NaN in both FP8 dtypes, and four of which are NaN in float32."""


@dataclass(frozen=True)
class Pages:
    """One layer's key cache and value cache.

    Args:
        key_cache: [num_blocks, block_size, kv_heads, elements].
        value_cache: [num_blocks, block_size, kv_heads, value elements].
        dtype: dtype of the keys and values before they are codes.
        form: the format.
        scales: `k_scale` and `v_scale` of a quantised cache: stored ones if the write measures
            them, otherwise 1. A global scale is 1 too. Empty if it is not quantised.
    """

    key_cache: Tensor
    value_cache: Tensor
    dtype: torch.dtype
    form: CacheFormat
    scales: dict[str, Any]

    @classmethod
    def like(
        cls,
        key: Tensor,
        value: Tensor,
        num_blocks: int,
        block_size: int,
        form: CacheFormat = PLAIN,
        layer: str = "a layer",
    ) -> "Pages":
        """Return caches for such keys and values, which read as NaN.

        Args:
            key, value: [tokens, kv_heads, elements].
            num_blocks: blocks in the cache.
            block_size: slots per block.
            form: the format.
            layer: what the keys belong to, in words.

        Raises:
            ValueError: keys or values of that size cannot be codes of the format.
        """
        check_format_heads(form, layer, key.shape[2], value.shape[2])
        key_cache, value_cache = (
            states.new_zeros(
                (
                    num_blocks,
                    block_size,
                    states.shape[1],
                    form.elements(states.shape[2]),
                ),
                dtype=form.dtype or states.dtype,
            )
            for states in (key, value)
        )
        names = ("k_scale", "v_scale") if form.is_quantised else ()
        scales: dict[str, Any] = dict.fromkeys(names, 1.0)
        if form.is_measured:
            halves = (key_cache, value_cache)
            scales = dict(zip(names, map(form.empty_scales, halves), strict=True))
        if form.has_global_scale:
            scales |= {"k_global_scale": 1.0, "v_global_scale": 1.0}
        pages = cls(key_cache, value_cache, key.dtype, form, scales)
        pages.poison(range(num_blocks))
        return pages

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Elements of a key and of a value."""
        return head_size_of(self.key_cache), head_size_of(self.value_cache)

    @property
    def of_write(self) -> dict[str, Any]:
        """What `reshape_and_cache` takes besides tensors and slots."""
        if not self.form.is_quantised:
            return {}
        return {**self.scales, "kv_cache_dtype": self.form.name}

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, one (source, destination) pair after another."""
        for cache in self._stored():
            for source, destination in pairs:
                cache[destination] = cache[source]

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks so that a read of them gives NaN."""
        if not blocks:
            return
        index = torch.tensor(list(blocks), device=self.key_cache.device)
        if self.form.is_measured:
            # codes of integers have no NaN, and their scale has
            for scale in self._stored_scales():
                scale.view(torch.uint8)[index] = NAN_BYTE
            return
        for cache in (self.key_cache, self.value_cache):
            if self.form.is_quantised:
                cache.view(torch.uint8)[index] = NAN_BYTE
            else:
                cache[index] = torch.nan

    def _stored(self) -> list[Tensor]:
        """Return all tensors with an axis of blocks."""
        return [self.key_cache, self.value_cache, *self._stored_scales()]

    def _stored_scales(self) -> list[Tensor]:
        """Return the scales that the write measures."""
        return [scale for scale in self.scales.values() if isinstance(scale, Tensor)]


def with_scales(arguments: dict[str, Any], pages: Pages) -> dict[str, Any]:
    """Return arguments of `paged_attention` with the scales of pages among its options."""
    if not pages.scales:
        return arguments
    return {**arguments, "options": replace(arguments["options"], **pages.scales)}
