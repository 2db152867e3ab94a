"""AttentionImpl: the base class of one layer's attention, common to all backends."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from ..contract.kinds import AttentionType
from ..contract.layer_pages import layer_format, split_half
from ..contract.metadata_classes import PagedAttentionMetadata
from ..contract.shapes import (
    Key,
    KVCache,
    Output,
    Query,
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
    check_stored_heads,
    check_whole_prompts,
    read_global_scales,
)


class LayerCache(NamedTuple):
    """A layer's cache in one step.

    Args:
        key, value: [num_blocks, block_size, kv_heads, head_size] and [num_blocks, block_size,
            kv_heads, head_size_v] views; of a packed format, their stored elements.
        scales: `k_scale` and `v_scale` of a quantised cache, and what multiplies block scales;
            empty if it is not quantised.
        format_name: Optional. Name of a format whose scales the cache stores. If None, they are
            the layer's.
    """

    key: Tensor
    value: Tensor
    scales: dict[str, Any]
    format_name: str | None = None


class AttentionImpl(ABC):
    """One layer's attention: write the new keys and values, then attend.

    Every option has the same meaning in prefill and decode.

    The kind of attention (`attn_type`) determines the keys that the queries attend to:

    - "decoder": the keys of the sequence, which are read from its cache.
    - "encoder", "encoder_only": the keys of the step itself, of an encoder-decoder model's encoder
      or of a whole prompt. Attention is bidirectional. Nothing is cached, so `kv_cache` and its
      dtype are not used.
    - "encoder_decoder": the keys of the encoder. They are written once, in the step that provides
      them, and every later step reads them.

    Args:
        num_heads: Query heads.
        head_size: Elements of a query's and of a key's head.
        scale: Factor of the dot products.
        num_kv_heads: Key/value heads. If None, as many as query heads.
        alibi_slopes: [num_heads] slopes. If None, no bias is added.
        sliding_window: Keys that a query attends to on each side, its own included. If None,
            all keys are visible.
        kv_cache_dtype: "auto" if the cache has the dtype of the keys; "fp8", "fp8_e4m3" or
            "fp8_e5m2" if it has FP8 elements, which are multiplied by the layer's `_k_scale` and
            `_v_scale`; or the name of a format with measured scales, which are stored after the
            codes of each head. `_k_scale_float` and `_v_scale_float` multiply block scales.
        logits_soft_cap: Cap of the scores. If None or 0, scores are not capped.
        attn_type: "decoder", "encoder", "encoder_only" or "encoder_decoder".
        kv_sharing_target_layer_name: An earlier layer whose cache this one reads; it then writes
            nothing. If None, the layer has a cache of its own.
        sinks: [num_heads] one score per head that has no value. If None, no sink is added.
        attention_chunk_size: Positions per chunk; a query attends to the keys of its own chunk. If
            None, the sequence is not divided.
        head_size_v: Elements of a value's head. If None, as many as of a key's. In a cache a value
            occupies the first elements of its slot, so it has no more than a key.
        position_bias: [num_heads, 2 * reach + 1] added to the scores by distance, as in
            `AttentionOptions`. If None, no bias is added.

    Raises:
        ValueError: Heads do not divide, a number is out of range, a kind or dtype is unknown, or
            options are meaningless together: in cross-attention those that depend on distances
            (window, chunk, ALiBi, bias), in an encoder a shared cache.

    Source:
        vLLM's AttentionImpl (docs/vllm-map.md says what differs).
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
        # vLLM's form: keys to the left and to the right of the query's own; -1 means all
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
        self._set_up()

    def _set_up(self) -> None:
        """Set what follows from the arguments of the constructor; a subclass may add to it."""
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
            layer: the layer whose scales apply to a quantised cache. Not used for other caches.
            query: [tokens, query_heads, head_size], decodes first. Rows past
                `num_actual_tokens` are padding. For "encoder": the tokens of all encoders of the
                step.
            key, value: Optional. [tokens, kv_heads, head_size] and [tokens, kv_heads,
                head_size_v]. In cross-attention: of all tokens that encoders compute in this
                step, or None if there are none. Also None if the layer reads another layer's
                cache.
            kv_cache: [2, num_blocks, block_size, kv_heads, stored_head_size] as its spec says,
                modified in place.
            attn_metadata: Optional. The step. If None (a profiling run), nothing is written.
            output: [tokens, query_heads, head_size_v], modified in place. Padding rows are not
                written.
            output_scale: Optional. One number, which the elements of an FP8 `output` will be
                multiplied by when they are read. If None, `output` is not quantised.
            output_block_scale: must be None, since outputs with one scale per block are not
                supported.

        Raises:
            ValueError: the output is missing or does not fit its scale, keys are given without
                slots or slots without keys, or the step has no metadata for this kind of
                attention.
            TypeError: the cache does not have the layer's dtype.
            NotImplementedError: `output_block_scale` is given.
        """

    def check_forward(
        self,
        output: Output | None,
        output_scale: Tensor | None,
        output_block_scale: Tensor | None,
    ) -> Output:
        """Return the output; raise if it is missing or an argument is not supported."""
        return check_impl_forward(output, output_scale, output_block_scale)

    def options(
        self,
        device: torch.device,
        output_scale: Tensor | None = None,
        **of_step: Any,
    ) -> AttentionOptions:
        """Return the options of attention, paged or not, of this layer in one step.

        Args:
            device: device on which the layer runs.
            output_scale: Optional. Scale of an FP8 output. If None, the output is not quantised.
            of_step: options that depend on the step or its cache, such as `causal` or `k_scale`.
        """
        own = self._options.get(device)
        if own is None:
            own = self._options[device] = self._own_options(device)
        if output_scale is not None:
            of_step["out_scale"] = output_scale
        of_step = {
            name: option for name, option in of_step.items() if option is not None
        }
        return replace(own, **of_step) if of_step else own

    def update_tensors(self) -> None:
        """Copy the layer's sinks, slopes and bias to its options again, after they changed.

        The options keep their tensors, so a captured CUDA graph reads the new numbers.
        """
        for device, options in self._options.items():
            for name, number in vars(self._own_options(device)).items():
                if isinstance(number, Tensor):
                    getattr(options, name).copy_(number)

    def _own_options(self, device: torch.device) -> AttentionOptions:
        """Return the options that the layer was created with, their tensors on a device."""
        tensors = {
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
            "position_bias": self.position_bias,
        }
        per_head: dict[str, Any] = {
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

    def layer_cache(
        self, layer: object, key_cache: Tensor, value_cache: Tensor, dtype: torch.dtype
    ) -> LayerCache:
        """Return the layer's cache: its keys, its values in their own head size, its scales.

        Args:
            layer: the layer, whose scales FP8 caches with one scale and block scales need.
            key_cache, value_cache: [num_blocks, block_size, kv_heads, stored_head_size].
            dtype: dtype of the model.

        Raises:
            TypeError: the cache does not have the layer's dtype.
            ValueError: the layer has no scales, or one per head where block scales need one.
        """
        check_cache_dtype(key_cache, self.kv_cache_dtype, dtype)
        form = layer_format(self.kv_cache_dtype)
        if form.is_measured:
            check_stored_heads(key_cache, self.head_size, form)
            sizes = self.head_size, self.head_size_v
            key, k_scale = split_half(key_cache, self.head_size, self.head_size, form)
            value, v_scale = split_half(value_cache, *sizes, form)
            stored = {"k_scale": k_scale, "v_scale": v_scale}
            scales = stored | read_global_scales(layer, form)
            return LayerCache(key, value, scales, form.name)
        scales = self._scales(layer, key_cache) if form.is_quantised else {}
        return LayerCache(key_cache, value_cache[..., : self.head_size_v], scales)

    def _scales(self, layer: object, kv_cache: Tensor) -> dict[str, Any]:
        """Return the scales of a quantised cache by name, on its device."""
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

    def new_keys(
        self,
        cache: LayerCache,
        attn_metadata: PagedAttentionMetadata,
        key: Key | None,
        value: Value | None,
    ) -> dict[str, Any] | None:
        """Return the arguments of `reshape_and_cache`, or None if nothing is written.

        Raises:
            ValueError: keys are given without slots, or slots without keys.
        """
        if self.kv_sharing_target_layer_name is not None:
            return None
        own, encoders = attn_metadata.slot_mapping, attn_metadata.cross_slot_mapping
        slots = encoders if self.crosses else own
        check_new_keys(key, value, slots, self.crosses)
        if key is None:
            return None
        return {
            "key": key,
            "value": value,
            "key_cache": cache.key,
            "value_cache": cache.value,
            "slot_mapping": slots,
            **cache.scales,
            **({"kv_cache_dtype": cache.format_name} if cache.format_name else {}),
        }

    def step_of(self, attn_metadata: PagedAttentionMetadata) -> PagedAttentionMetadata:
        """Return the step with the lengths and blocks of the keys that the layer reads."""
        return attn_metadata.cross_metadata if self.crosses else attn_metadata

    def paged_arguments(
        self,
        query: Query,
        cache: LayerCache,
        step: PagedAttentionMetadata,
        out: Output,
        output_scale: Tensor | None,
    ) -> dict[str, Any]:
        """Return the arguments of `paged_attention` for a step, or for a part of it.

        Args:
            query, out: [tokens, query_heads, head_size] and [tokens, query_heads, head_size_v]
                of the part's tokens.
            cache: result of `layer_cache`.
            step: metadata of the part, such as `decode_metadata`.
            output_scale: Optional. Scale of an FP8 output. If None, it is not quantised.
        """
        return {
            "query": query,
            "key_cache": cache.key,
            "value_cache": cache.value,
            "block_table": step.block_table,
            "query_start_loc": step.query_start_loc,
            "seq_lens": step.seq_lens,
            "max_query_len": step.max_query_len,
            "max_seq_len": step.max_seq_len,
            "scale": self.scale,
            "out": out,
            "options": self.options(
                query.device,
                output_scale,
                # None is causal here, and costs no new object
                causal=None if step.causal is True else step.causal,
                tree_mask=step.tree_mask,
                query_ranges=step.query_ranges,
                **cache.scales,
            ),
        }

    def encoder_arguments(
        self,
        query: Query,
        key: Key | None,
        value: Value | None,
        attn_metadata: PagedAttentionMetadata,
        out: Output,
        output_scale: Tensor | None,
    ) -> dict[str, Any]:
        """Return the arguments of `encoder_attention` for an encoder's tokens in this step.

        Raises:
            ValueError: the keys or the start locations of the encoders' tokens are missing, or a
                prompt is split into chunks.
        """
        check_own_keys(self.attn_type, key=key, value=value)
        assert key is not None and value is not None
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
            # query ranges belong to images, which are part of the decoder's sequence
            starts, ranges = metadata.encoder_query_start_loc, None
        return {
            "query": query[:tokens],
            "key": key[:tokens],
            "value": value[:tokens],
            "query_start_loc": starts,
            "key_start_loc": starts,
            "max_query_len": longest,
            "max_key_len": longest,
            "scale": self.scale,
            "out": out[:tokens],
            "options": self.options(query.device, output_scale, query_ranges=ranges),
        }
