"""What does one layer's attention have in common in every backend?"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from .metadata_classes import PagedAttentionMetadata
from .refusals import check_positive
from .refusals.attention import check_impl, check_impl_forward
from .shapes import Key, KVCache, Output, Query, Value


class AttentionImpl(ABC):
    """One layer's attention: write the new keys and values, then attend.

    Whatever is asked for here holds in prefill and decode alike.

    Args:
        num_heads: query heads.
        head_size: elements of a head.
        scale: what scores are multiplied with.
        num_kv_heads: key/value heads; None: as many as query heads.
        alibi_slopes: [num_heads] slopes; None: no bias.
        sliding_window: keys that a query sees, itself included; None: all up to itself.
        kv_cache_dtype: "auto", the only one: the cache holds what the keys are.
        logits_soft_cap: cap of the scores; None or 0: no cap.
        attn_type: "decoder", the only one.
        kv_sharing_target_layer_name: an earlier layer whose cache this one reads; it then
            writes nothing. None: the layer has a cache of its own.
        sinks: [num_heads] a score beside those of the keys that takes weight and has no value;
            None: no sink.

    Raises:
        ValueError: heads that do not divide, or a number out of range.
        NotImplementedError: another cache dtype or attention type.

    Source:
        vLLM's AttentionImpl, whose xFormers backend left window and cap out of decodes.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_positive(num_heads=num_heads, num_kv_heads=num_kv_heads)
        check_impl(
            num_heads,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            sinks,
        )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.num_queries_per_kv = num_heads // num_kv_heads
        self.alibi_slopes = alibi_slopes
        # vLLM's form: keys to the left and to the right of the query's own; -1: all
        self.sliding_window = (
            (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        )
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._per_head: dict[torch.device, dict[str, Tensor]] = {}

    @abstractmethod
    def forward(
        self,
        layer: object,
        query: Query,
        key: Key,
        value: Value,
        kv_cache: KVCache,
        attn_metadata: PagedAttentionMetadata | None,
        output: Output | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Output:
        """Write the step's keys and values, attend, and return `output`.

        Args:
            layer: the layer that calls; unused so far.
            query: [tokens, query_heads, head_size], decodes first; rows past
                `num_actual_tokens` are padding.
            key, value: [tokens, kv_heads, head_size].
            kv_cache: [2, num_blocks, block_size, kv_heads, head_size], changed.
            attn_metadata: the step; None in a profiling run, which leaves everything as it is.
            output: the shape of query, changed; padding rows are left as they are.
            output_scale, output_block_scale: None, as no output is quantised.

        Raises:
            ValueError: no output.
            NotImplementedError: an output scale.
        """

    def check_forward(
        self,
        output: Output | None,
        output_scale: Tensor | None,
        output_block_scale: Tensor | None,
    ) -> Output:
        """Return the output, or refuse what no backend here does."""
        return check_impl_forward(output, output_scale, output_block_scale)

    def options(self, device: torch.device) -> dict[str, Any]:
        """Return the options of `paged_attention` that this layer asks for."""
        if device not in self._per_head:
            tensors = {"alibi_slopes": self.alibi_slopes, "sinks": self.sinks}
            self._per_head[device] = {
                name: torch.as_tensor(given, dtype=torch.float32, device=device)
                for name, given in tensors.items()
                if given is not None
            }
        left = self.sliding_window[0]
        return {
            "scale": self.scale,
            "sliding_window": None if left < 0 else left + 1,
            "logits_soft_cap": self.logits_soft_cap or None,
            **self._per_head[device],
        }
