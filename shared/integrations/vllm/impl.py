"""Attention of one layer inside vLLM: cache write, and paged or encoder attention."""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl as VllmAttentionImpl
from vllm.v1.attention.backend import AttentionType

from ...contract.attention_options import AttentionOptions
from ...contract.layer_pages import split_scaled_cache
from ...validation.impl import read_global_scales
from .builder import PagetwinMetadata, load_plugin_implementation
from .caches import format_of, split_layer_cache
from .ranges import StepRanges
from .settings import is_batch_invariant, read_settings
from .shared_layers import share_keys
from .warm_up import StepBounds, can_compile, warm_up_layers


class PagetwinImpl(VllmAttentionImpl):
    """Runs one layer on a twin.

    Args:
        num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window: as in vLLM.
        kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name: as in vLLM.
        sinks: Optional. [num_heads] one score per head that has no value. If None, there is none.

    Attributes:
        takes_cascade: whether a shared prefix may be read once: no option needs positions, rows
            may depend on the batch, and the layer reads the cache of its own sequence, whose keys
            this rank stores.
        bounds: Optional. Upper bounds of the steps, set by the metadata builder. If None, nothing
            is compiled ahead of the first step.
        engine_layers: all of the engine's layers, set with `bounds`. Empty after the warm-up.
        ranges: Optional. The ranges of its steps, set by the metadata builder. If None, no step has
            any.

    Raises:
        ValueError, NotImplementedError: what the twin's own layer rejects, prefill context
            parallelism, and what decode context parallelism does not take.
    """

    # of decode context parallelism: partial results are exchanged here, and each new token has
    # its own number of keys, so drafts may have any interleave size
    supports_dcp: bool = True
    can_return_lse_for_decode: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

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
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.run = load_plugin_implementation()
        # bound once, since every layer calls them in every step
        self._attend, self._write = self.run.paged_attention, self.run.reshape_and_cache
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = getattr(attn_type, "value", attn_type)
        self.sliding_window = sliding_window
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        form = format_of(kv_cache_dtype)
        self.own = self.run.backends[0].get_impl_cls()(
            num_heads,
            head_size,
            scale,
            self.num_kv_heads,
            alibi_slopes,
            sliding_window,
            form.name,
            logits_soft_cap,
            self.attn_type,
            kv_sharing_target_layer_name,
            sinks,
        )
        # scales of some formats are stored in the cache; FP8 has those of vLLM's layer, which
        # multiply block scales too
        self._measured = form if form.is_measured else None
        self._has_scales = form.is_quantised
        self._invariant = is_batch_invariant()
        self.shared = share_keys(
            self,
            self.run,
            num_heads,
            head_size,
            self.scale,
            self.num_kv_heads,
            form,
            kv_sharing_target_layer_name is None,
            sliding_window=sliding_window,
            alibi_slopes=alibi_slopes,
            attn_type=self.attn_type,
            is_batch_invariant=self._invariant,
        )
        self.takes_cascade = (
            self.shared is None
            and sliding_window is None
            and alibi_slopes is None
            and not self._invariant
            and self.attn_type == AttentionType.DECODER.value
        )
        self.bounds: StepBounds | None = None
        self.engine_layers: tuple[Any, ...] = ()
        self.ranges: StepRanges | None = None
        self._warms_up = read_settings().warms_up
        self._options: dict[Any, AttentionOptions] = {}
        self._cache: Tensor | None = None
        self._views: tuple[Tensor, Tensor] | None = None
        self._stored_scales: dict[str, Tensor | float] = {}

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Update the layer's copy of its sinks, in place: captured graphs read it."""
        self.own.update_tensors()

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return whether outputs can be quantised: to FP8 with one scale, known beforehand."""
        if self.shared is not None:
            return False
        from vllm.model_executor.layers.quantization.utils.quant_utils import (
            kFp8StaticTensorSym,
        )

        return bool(quant_key == kFp8StaticTensorSym)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write the step's keys and values; tokens with slot -1 are not stored."""
        if self.own.is_uncached or not kv_cache.numel():
            return
        caches, scales = self._split(kv_cache), self._scales_of(layer, kv_cache)
        form = self._measured
        named = {} if form is None else {"kv_cache_dtype": form.name}
        self._write(key, value, *caches, slot_mapping, **scales, **named)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: PagetwinMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend, and return `output`.

        vLLM calls `do_kv_cache_update` before, so decoder layers read the cache alone.

        Args:
            layer: vLLM's layer, which has the scales of an FP8 cache with one scale.
            query, key, value: [tokens, heads, head_size] of the step, with padding at the end.
            kv_cache: the layer's cache; without elements while vLLM measures memory.
            attn_metadata: Optional. The step. If None (a dummy run), the output is 0.
            output: [tokens, num_heads, head_size_v], modified in place.
            output_scale: Optional. Scale of an FP8 output. If None, it is not quantised.
            output_block_scale: must be None.

        Raises:
            NotImplementedError: `output_block_scale` is given.
        """
        if output_block_scale is not None:
            raise NotImplementedError(
                "output_block_scale: expected None, since outputs have one scale"
            )
        if self.bounds is not None:
            self._warm_up(layer, query, kv_cache, output)
        if attn_metadata is None:
            if self.shared is not None:
                self.shared.allocate(query, output)
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        rows, out = query[:tokens], output[:tokens]
        scales = self._scales_of(layer, kv_cache)
        options = self._options_of(
            layer,
            query.device,
            scales,
            attn_metadata.causal,
            output_scale,
            attn_metadata,
        )
        if self.own.is_uncached:
            assert key is not None and value is not None
            starts, longest = (
                attn_metadata.query_start_loc,
                attn_metadata.max_query_len,
            )
            self.run.encoder_attention(
                rows, key[:tokens], value[:tokens], starts, starts, longest, longest,
                self.scale, out, options=options,
            )  # fmt: skip
            return output
        step = attn_metadata
        if self.shared is not None:
            options = self._options_of(layer, query.device, scales, True)
            caches = self._split(kv_cache)
            key = None if key is None else key[:tokens]
            value = None if value is None else value[:tokens]
            self.shared.attend(rows, key, value, caches, step, out, options)
            return output
        tensors = (
            rows, *self._split(kv_cache), step.block_table, step.query_start_loc,
            step.seq_lens,
        )  # fmt: skip
        bounds = (step.max_query_len, step.max_seq_len)
        if step.common_prefix_len and output_scale is None:
            self.run.cascade_attention(
                *tensors, *bounds, step.common_prefix_len, self.scale, out, options=options
            )  # fmt: skip
        else:
            self._attend(*tensors, *bounds, self.scale, out, options=options)
        return output

    def _split(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return the key and value views; they take microseconds, so the last ones are kept."""
        if self._views is None or self._cache is not kv_cache:
            size, form = self.head_size, self._measured
            if form is None:
                views = split_layer_cache(kv_cache, size, self.kv_cache_dtype)
            else:
                key, value, k_scale, v_scale = split_scaled_cache(kv_cache, size, form)
                views = (key, value)
                self._stored_scales = {"k_scale": k_scale, "v_scale": v_scale}
            self._cache, self._views = kv_cache, views
        return self._views

    def _scales_of(self, layer: Any, kv_cache: Tensor) -> dict[str, Tensor | float]:
        """Return the scales of the layer's cache, by the name of the option; empty if it has none.

        They are the same objects in each step, unless vLLM gives other ones.
        """
        if not self._has_scales or self.own.is_uncached:
            return {}
        if self._measured is None:
            return {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        self._split(kv_cache)
        return self._stored_scales | read_global_scales(layer, self._measured)

    def _options_of(
        self,
        layer: Any,
        device: torch.device,
        scales: dict[str, Tensor | float],
        causal: bool | Tensor,
        output_scale: Tensor | None = None,
        step: PagetwinMetadata | None = None,
    ) -> AttentionOptions:
        """Return the options of a step. Those without a tensor of the step are kept."""
        ranges = window = None
        if step is not None and step.query_ranges and not self.own.is_uncached:
            ranges, window = step.ranges_of(layer), step.rswa_window
        kept = output_scale is None and isinstance(causal, bool) and ranges is None
        kind = (device, causal) if kept else None
        options: AttentionOptions | None = self._options.get(kind)
        # vLLM may replace either scale when it loads weights again, or the cache with its scales
        if options is not None and all(
            getattr(options, name) is scale for name, scale in scales.items()
        ):
            return options
        options = self.own.options(
            device,
            output_scale,
            # None is the default of an operation, and makes the plain call cheap
            causal=None if causal is (not self.own.is_uncached) else causal,
            batch_invariant=True if self._invariant else None,
            query_ranges=ranges,
            sliding_window=window,
            **scales,
        )
        assert options is not None
        if kept:
            self._options[kind] = options
        return options

    def _warm_up(
        self, layer: Any, query: Tensor, kv_cache: Tensor, output: Tensor
    ) -> None:
        """Compile the layer's kernels, if its cache is there; called until that was done.

        Kernels of layers that differ from it in options alone are compiled at the same time.
        """
        bounds = self.bounds
        assert bounds is not None
        warms_up = self._warms_up and not self.own.is_uncached
        if warms_up and not can_compile(kv_cache):
            return
        of_steps = self.ranges.of_options if self.ranges else lambda options: (options,)
        alike = [layer, *filter(self._is_alike, self.engine_layers)]
        self.bounds, self.engine_layers = None, ()
        if not warms_up:
            return
        # kernels depend on the strides of stored scales, which layers of one kind share
        options = [
            option
            for other in alike
            for option in of_steps(
                other.impl._options_of(
                    other,
                    query.device,
                    self._scales_of(other, kv_cache),
                    not other.impl.own.crosses,
                )
            )
        ]
        warm_up_layers(
            self.run.name,
            self._split(kv_cache),
            self.num_heads,
            query.dtype,
            options,
            bounds,
            None if self.shared is None else self.shared.allocate(query, output),
            cascades=bounds.has_cascades and self.takes_cascade and not self.ranges,
            cache_format=None if self._measured is None else self._measured.name,
            scale=self.scale,
        )

    def _is_alike(self, layer: Any) -> bool:
        """Return whether another layer waits for a warm-up, and may have the same kind of cache."""
        other = getattr(layer, "impl", None)
        if other is self or type(other) is not type(self) or self.shared is not None:
            return False
        names = (
            "bounds", "num_heads", "num_kv_heads", "head_size", "scale", "kv_cache_dtype"
        )  # fmt: skip
        return not other.own.is_uncached and all(
            getattr(other, name) == getattr(self, name) for name in names
        )
