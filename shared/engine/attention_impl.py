"""What does one layer's attention have in common in every backend?"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ..contract.kinds import FP8_DTYPES, AttentionType
from ..contract.metadata_classes import PagedAttentionMetadata
from ..contract.shapes import (
    Key,
    KVCache,
    Output,
    Query,
    SlotMapping,
    TokenRanges,
    Value,
)
from ..validation import check_positive
from ..validation.impl import (
    UNCACHED,
    check_cache_dtype,
    check_encoder_fields,
    check_impl,
    check_impl_forward,
    check_layer_scale,
    check_new_keys,
    check_own_keys,
    check_whole_prompts,
)


class AttentionImpl(ABC):
    """One layer's attention: write the new keys and values, then attend.

    Whatever is asked for here holds in prefill and decode alike.

    The kind of attention says whose keys answer. "decoder": those of the sequence, through its
    cache. "encoder" and "encoder_only": those that the step brings itself, of the encoder beside a
    decoder or of the whole prompt; each token sees the others in both directions, and nothing is
    cached, so `kv_cache` and its dtype mean nothing. "encoder_decoder": those of the encoder,
    which are written once, when they are given, and read by every later step, which gives none.

    Args:
        num_heads: query heads.
        head_size: elements of a query's and of a key's head.
        scale: what scores are multiplied with.
        num_kv_heads: key/value heads; None: as many as query heads.
        alibi_slopes: [num_heads] slopes; None: no bias.
        sliding_window: keys that a query sees to each side, itself included; None: all. Of a
            decoder's queries the side behind them is hidden anyway.
        kv_cache_dtype: "auto": the cache holds what the keys are; "fp8" or "fp8_e4m3",
            "fp8_e5m2": it holds FP8 numbers, which stand for themselves times the layer's
            `_k_scale` and `_v_scale`.
        logits_soft_cap: cap of the scores; None or 0: no cap.
        attn_type: "decoder", "encoder", "encoder_only" or "encoder_decoder".
        kv_sharing_target_layer_name: an earlier layer whose cache this one reads; it then
            writes nothing. None: the layer has a cache of its own.
        sinks: [num_heads] a score beside those of the keys that takes weight and has no value;
            None: no sink.
        attention_chunk_size: positions in a chunk; a query sees the keys of its own chunk. None:
            of all.
        head_size_v: elements of a value's head; None: as many as of a key's. In a cache a value
            takes the first elements of its slot, so it has no more than a key.
        position_bias: [num_heads, 2 * reach + 1] added to the scores by distance, as
            `paged_attention` does; None: no bias.

    Raises:
        ValueError: heads that do not divide, a number out of range, no such kind or dtype, or
            options without meaning beside each other: in cross-attention whatever counts
            positions (window, chunk, ALiBi, bias), in an encoder a shared cache.

    Source:
        vLLM's AttentionImpl, whose xFormers backend left window, cap and the scales of FP8 out of
        decodes, and refused all kinds but "decoder", ALiBi and shared caches.
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
        attention_chunk_size: int | None = None,
        head_size_v: int | None = None,
        position_bias: Tensor | None = None,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_positive(num_heads=num_heads, num_kv_heads=num_kv_heads)
        head_size_v = head_size if head_size_v is None else head_size_v
        check_impl(
            num_heads,
            num_kv_heads,
            head_size,
            head_size_v,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            sinks,
            attention_chunk_size,
            position_bias,
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
        self.attention_chunk_size = attention_chunk_size
        self.head_size_v = head_size_v
        self.position_bias = position_bias
        self.is_uncached = attn_type in UNCACHED
        self.crosses = attn_type == AttentionType.ENCODER_DECODER
        self._options: dict[torch.device, AttentionOptions] = {}

    @abstractmethod
    def forward(
        self,
        layer: object,
        query: Query,
        key: Key | None,
        value: Value | None,
        kv_cache: KVCache,
        attn_metadata: PagedAttentionMetadata | None,
        output: Output | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Output:
        """Write the step's keys and values, attend, and return `output`.

        Args:
            layer: the layer whose scales a quantised cache is read with; unused else.
            query: [tokens, query_heads, head_size], decodes first; rows past
                `num_actual_tokens` are padding. In an encoder beside a decoder: the tokens of
                all encoders of the step.
            key, value: [tokens, kv_heads, head_size] and [tokens, kv_heads, head_size_v]. In
                cross-attention: of all tokens that encoders compute in this step, or None where
                they compute none. None too where the layer reads the cache of another.
            kv_cache: [2, num_blocks, block_size, kv_heads, head_size], changed.
            attn_metadata: the step; None in a profiling run, which leaves everything as it is.
            output: [tokens, query_heads, head_size_v], changed; padding rows are left as they
                are.
            output_scale: what the numbers of an FP8 `output` will be multiplied with, one for
                all; None: `output` is not quantised.
            output_block_scale: None, as no output is quantised by blocks.

        Raises:
            ValueError: no output, an output and a scale that do not fit, keys without slots or
                slots without keys, or a step that lacks what the kind of attention needs.
            TypeError: a cache of another dtype than the layer's.
            NotImplementedError: an output quantised by blocks.
        """

    def check_forward(
        self,
        output: Output | None,
        output_scale: Tensor | None,
        output_block_scale: Tensor | None,
    ) -> Output:
        """Return the output, or refuse what no backend here does."""
        return check_impl_forward(output, output_scale, output_block_scale)

    def options(
        self,
        device: torch.device,
        output_scale: Tensor | None = None,
        **of_step: Any,
    ) -> AttentionOptions:
        """Return the options of attention, paged or not, of this layer in one step.

        Args:
            device: where the layer runs.
            output_scale: the scale of an FP8 output; None: the output is not quantised.
            of_step: options that the step or its cache gives, such as `causal` or `k_scale`.
        """
        own = self._options.get(device)
        if own is None:
            own = self._options[device] = self._own_options(device)
        if output_scale is not None:
            of_step["out_scale"] = output_scale
        of_step = {name: each for name, each in of_step.items() if each is not None}
        return replace(own, **of_step) if of_step else own

    def _own_options(self, device: torch.device) -> AttentionOptions:
        """Return the layer's own options, with its tensors on a device."""
        tensors = {
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
            "position_bias": self.position_bias,
        }
        per_head = {
            name: torch.as_tensor(given, dtype=torch.float32, device=device)
            for name, given in tensors.items()
            if given is not None
        }
        left = self.sliding_window[0]
        own = AttentionOptions(
            sliding_window=None if left < 0 else left + 1,
            logits_soft_cap=self.logits_soft_cap or None,
            attention_chunk_size=self.attention_chunk_size,
            **per_head,
        )
        return own if own.given else DEFAULT_OPTIONS

    def scales(
        self, layer: object, kv_cache: KVCache, model_dtype: torch.dtype
    ) -> dict[str, Any]:
        """Return what the numbers of a quantised cache stand for; nothing of another cache.

        Raises:
            TypeError: the cache has another dtype than the layer was made for.
            ValueError: the layer has no scales.
        """
        check_cache_dtype(kv_cache, self.kv_cache_dtype, model_dtype)
        if kv_cache.dtype not in FP8_DTYPES:
            return {}
        found = {
            "k_scale": check_layer_scale(layer, "_k_scale"),
            "v_scale": check_layer_scale(layer, "_v_scale"),
        }
        return {
            name: scale.to(kv_cache.device, torch.float32)
            if isinstance(scale, Tensor)
            else scale
            for name, scale in found.items()
        }

    def slots(
        self,
        attn_metadata: PagedAttentionMetadata,
        key: Key | None,
        value: Value | None,
    ) -> SlotMapping | None:
        """Return where the step's keys and values go; None: nothing is written.

        Raises:
            ValueError: keys without slots, or slots without keys.
        """
        if self.kv_sharing_target_layer_name is not None:
            return None
        own, encoders = attn_metadata.slot_mapping, attn_metadata.cross_slot_mapping
        found = encoders if self.crosses else own
        check_new_keys(key, value, found, self.crosses)
        return None if key is None else found

    def whole_prompts(
        self,
        attn_metadata: PagedAttentionMetadata,
        key: Key | None,
        value: Value | None,
    ) -> tuple[int, dict[str, Any], TokenRanges | None]:
        """Return an encoder's tokens in this step, and what `encoder_attention` takes of it.

        Returns:
            The number of tokens, the arguments for starts and lengths, and the query ranges.

        Raises:
            ValueError: no keys, or the step does not say where the tokens start, or brings a
                prompt in chunks.
        """
        check_own_keys(self.attn_type, key=key, value=value)
        metadata = attn_metadata
        tokens, longest = metadata.num_actual_tokens, metadata.max_query_len
        starts, ranges = metadata.query_start_loc, metadata.query_ranges
        if self.attn_type == AttentionType.ENCODER_ONLY:
            check_whole_prompts(metadata)
        else:
            check_encoder_fields(metadata)
            assert metadata.encoder_query_start_loc is not None
            assert metadata.encoder_query_start_loc_cpu is not None
            lens = metadata.encoder_query_start_loc_cpu.diff()
            tokens, longest = int(lens.sum()), int(lens.max()) if lens.numel() else 0
            # images stand in the decoder's sequence
            starts, ranges = metadata.encoder_query_start_loc, None
        lengths = {
            "query_start_loc": starts,
            "key_start_loc": starts,
            "max_query_len": longest,
            "max_key_len": longest,
        }
        return tokens, lengths, ranges
