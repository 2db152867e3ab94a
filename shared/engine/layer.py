"""Attention: the layer of a model that calls a backend.

Each layer of a model has an `Attention` module. It holds the layer's cache and scales, reshapes
flat activations to heads, and calls the backend's implementation, which writes the new keys and
values and computes attention. Layers are registered by name in a dictionary that the caller
provides, so that caches can be assigned by name. A layer may share the cache of an earlier layer;
it then uses the scales of that layer.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..contract.kinds import AttentionType
from ..contract.layer_pages import layer_format
from ..contract.metadata_classes import PagedAttentionMetadata
from ..contract.specs import (
    CacheConfig,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from ..recorder.wrappers.backend import backend_from_environment
from ..validation import check_positive
from ..validation.impl import UNCACHED
from ..validation.layer import (
    check_kv_sharing_target,
    check_latent_format,
    check_new_layer,
    check_new_scale,
    check_scale_inputs,
    check_scale_types,
    reject_option,
)
from .backend_interface import AttentionBackend
from .selector import get_attn_backend

Q_SCALE_RANGE, K_SCALE_RANGE, V_SCALE_RANGE = 200.0, 200.0, 100.0
"""The values that the largest query, key and value are scaled to (vLLM's constants)."""

NEUTRAL_OPTIONS = {"kv_cache_dtype": "auto", "attn_type": AttentionType.DECODER}
"""Values that have no effect, so a layer need not support the option. For all others: None."""


class Attention(nn.Module):
    """One layer's attention, independent of the backend that runs it.

    Args:
        num_heads: query heads.
        head_size: elements of a head.
        scale: factor of the dot products of queries and keys.
        num_kv_heads: Optional. Key/value heads. If None, as many as query heads.
        alibi_slopes: Optional. [num_heads] ALiBi slopes. If None, no bias is added.
        cache_config: Optional. Settings of all layers' caches. If None, the defaults.
        logits_soft_cap: Optional. Cap of the scores. If None, they are not capped.
        per_layer_sliding_window: Optional. Keys that a token attends to, its own included. If
            None, the window of `cache_config`.
        use_mla: whether query, key and value have the shapes of latent attention. They are then
            passed to the implementation without reshaping.
        prefix: name of the layer, unique in the model.
        attn_type: kind of attention, as in `AttentionImpl`.
        kv_sharing_target_layer_name: Optional. An earlier layer whose cache this layer reads. It
            then writes nothing. If None, the layer has a cache of its own.
        attn_backend: Optional. A backend, or its name. If None, `get_attn_backend` chooses.
        static_forward_context: Optional. The model's layers by name, modified in place: this
            layer is added. If None, the layer is not registered.
        attention_chunk_size: Optional. Positions per chunk; a token attends to the keys of its
            own chunk. If None, the sequence is not divided.
        head_size_v: Optional. Elements of a value's head. If None, as many as of a key's.
        extra_impl_args: further arguments of the backend's implementation, such as `sinks` and
            `position_bias`.

    Raises:
        ValueError: the heads do not divide, the name is used already, or the layer whose cache is
            shared is missing or has another kind of cache. The layer is then not registered.
        NotImplementedError: the backend's implementation does not support an option.

    Source:
        vLLM's `Attention`, which reads layers and metadata from global state.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | None = None,
        cache_config: CacheConfig | None = None,
        logits_soft_cap: float | None = None,
        per_layer_sliding_window: int | None = None,
        use_mla: bool = False,
        prefix: str = "",
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        attn_backend: type[AttentionBackend] | str | None = None,
        static_forward_context: MutableMapping[str, "Attention"] | None = None,
        attention_chunk_size: int | None = None,
        head_size_v: int | None = None,
        **extra_impl_args: Any,
    ) -> None:
        super().__init__()
        config = cache_config or CacheConfig()
        window = per_layer_sliding_window
        self.num_heads = num_heads
        self.head_size = head_size
        self.head_size_v = head_size if head_size_v is None else head_size_v
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.attention_chunk_size = attention_chunk_size
        self.sliding_window = config.sliding_window if window is None else window
        self.kv_cache_dtype = config.cache_dtype
        self._form = layer_format(self.kv_cache_dtype)
        # scales per token are measured at each write; a global scale is one of the layer's
        self.calculate_kv_scales = (
            config.calculate_kv_scales and not self._form.has_token_scales
        )
        self.use_mla = use_mla
        self.layer_name = prefix
        self.attn_type = AttentionType(attn_type)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.has_sink = extra_impl_args.get("sinks") is not None
        self.dtype = torch.get_default_dtype()
        self._check_heads()
        check_latent_format(prefix, use_mla, self._form)
        layers = {} if static_forward_context is None else static_forward_context
        check_new_layer(prefix, layers)
        self._target = self._find_target(layers)
        self.attn_backend: type[AttentionBackend] = backend_from_environment(
            self._choose_backend(attn_backend, config)
        )
        self.backend = self.attn_backend.get_name()
        self.use_output = self.attn_backend.accept_output_buffer
        optional = {
            "attention_chunk_size": attention_chunk_size,
            "head_size_v": head_size_v,
        }
        options = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": self.sliding_window,
            "kv_cache_dtype": self.kv_cache_dtype,
            "logits_soft_cap": logits_soft_cap,
            "attn_type": self.attn_type,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            **extra_impl_args,
            **{name: option for name, option in optional.items() if option is not None},
        }
        self.impl = self._make_impl(float(scale), options)
        self._hides_slots = bool(
            self._target
        ) and not self.attn_backend.supports_option("kv_sharing_target_layer_name")
        self.kv_cache: Tensor = torch.empty(0)
        self._init_scales()
        layers[prefix] = self

    def _check_heads(self) -> None:
        check_positive(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v,
        )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads ="
                f" {self.num_kv_heads}"
            )

    def _find_target(
        self, layers: Mapping[str, "Attention"]
    ) -> tuple["Attention", ...]:
        """Return the layer whose cache is shared, if any.

        In a tuple, because nn.Module registers an attribute that is a module as a submodule.
        """
        name = self.kv_sharing_target_layer_name
        if name is None:
            return ()
        check_kv_sharing_target(self, name, layers)
        return (layers[name],)

    def _choose_backend(
        self, asked: type[AttentionBackend] | str | None, config: CacheConfig
    ) -> type[AttentionBackend]:
        if asked is not None and not isinstance(asked, str):
            return asked
        spec = KVCacheSpec(
            config.block_size, self.num_kv_heads, self.head_size, self.dtype
        )
        device = torch.get_default_device()
        free = config.is_attention_free
        return get_attn_backend(asked, spec, device, is_attention_free=free)

    def _make_impl(self, scale: float, options: dict[str, Any]) -> Any:
        """Return the backend's implementation; raise if it does not support an option."""
        taken = {name for name in options if self.attn_backend.supports_option(name)}
        for name, value in options.items():
            # if a cache is shared, forward passes no slots, so every implementation supports it
            is_needed = name != "kv_sharing_target_layer_name"
            if is_needed and name not in taken and not _is_neutral(name, value):
                reject_option(self.layer_name, self.backend, name, value)
        return self.attn_backend.get_impl_cls()(
            self.num_heads,
            self.head_size,
            scale,
            self.num_kv_heads,
            **{name: value for name, value in options.items() if name in taken},
        )

    def _init_scales(self) -> None:
        numbers = {
            "_q_scale": 1.0,
            "_k_scale": 1.0,
            "_v_scale": 1.0,
            "_prob_scale": 1.0,
            "q_range": Q_SCALE_RANGE,
            "k_range": K_SCALE_RANGE,
            "v_range": V_SCALE_RANGE,
        }
        for name, number in numbers.items():
            scalar = torch.tensor(number, dtype=torch.float32)
            self.register_buffer(name, scalar, persistent=False)
        self._q_scale_float = 1.0
        # None if each kv head has a scale of its own
        self._k_scale_float: float | None = 1.0
        self._v_scale_float: float | None = 1.0

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        attn_metadata: PagedAttentionMetadata | Mapping[str, Any] | None,
        output_shape: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the attention output of each new token.

        Args:
            query: [tokens, num_heads * head_size].
            key, value: [tokens, num_kv_heads * head_size] and [tokens, num_kv_heads *
                head_size_v]. In cross-attention the tokens are those that encoders compute in
                this step; None if there are none.
            attn_metadata: Optional. The metadata of the step, or a mapping from layer names to
                metadata. A layer that shares a cache and has no entry uses that of its target. If
                None, the run is a profiling run.
            output_shape: Optional. Shape of the output. If None, [tokens, num_heads *
                head_size_v].

        Returns:
            [tokens, hidden]. Padding rows are zero.

        Raises:
            KeyError: the mapping has no entry for this layer.
        """
        # step: find the layer's metadata
        metadata = self._metadata_of_layer(attn_metadata)
        # step: measure the scales, once
        if self.calculate_kv_scales and metadata is not None:
            self._measure_scales(query, key, value, metadata)
        # step: remove the slots if the layer shares a cache
        metadata = self._without_slots(metadata)
        if not self.use_output:
            result: Tensor = self.impl.forward(
                self, query, key, value, self.kv_cache, metadata
            )
            return result
        # step: reshape the activations to heads
        if output_shape is not None:
            shape = tuple(output_shape)
        elif self.use_mla or self.head_size_v == self.head_size:
            shape = tuple(query.shape)
        else:
            shape = (*query.shape[:-1], self.num_heads * self.head_size_v)
        output = query.new_zeros(shape)
        hidden = output.shape[-1]
        heads = output
        if not self.use_mla:
            query = query.view(-1, self.num_heads, self.head_size)
            heads = output.view(-1, self.num_heads, self.head_size_v)
            if key is not None:
                key = key.view(-1, self.num_kv_heads, self.head_size)
            if value is not None:
                value = value.view(-1, self.num_kv_heads, self.head_size_v)
        # step: write the keys and values, and compute attention
        owner = self._target[0] if self._target else self
        self.impl.forward(owner, query, key, value, self.kv_cache, metadata, heads)
        return output.view(-1, hidden)

    def _metadata_of_layer(self, attn_metadata: Any) -> Any:
        """Return the metadata of this layer, else that of the layer whose cache it shares."""
        if not isinstance(attn_metadata, Mapping):
            return attn_metadata
        for name in (self.layer_name, self.kv_sharing_target_layer_name):
            if name in attn_metadata:
                return attn_metadata[name]
        raise KeyError(
            f"attn_metadata has no entry {self.layer_name!r}: expected one of"
            f" {', '.join(map(repr, attn_metadata)) or 'none'}"
        )

    def _without_slots(self, metadata: Any) -> Any:
        """Return metadata without slots if the implementation would write to a shared cache."""
        if not self._hides_slots or metadata is None:
            return metadata
        nothing = metadata.slot_mapping[:0]
        if self.attn_type == AttentionType.ENCODER_DECODER:
            return replace(metadata, cross_slot_mapping=nothing)
        return replace(metadata, slot_mapping=nothing)

    def _measure_scales(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, metadata: Any
    ) -> None:
        """Measure the scales of a layer that writes a cache; padding rows are not read.

        A step without tokens, or without keys, measures nothing, so a later step does.
        """
        if key is None or self._target or self.attn_type in UNCACHED:
            return
        tokens = keys = metadata.num_actual_tokens
        if self.attn_type == AttentionType.ENCODER_DECODER:
            starts = metadata.encoder_query_start_loc_cpu
            keys = 0 if starts is None else int(starts[-1])
        if tokens and keys:
            value = None if value is None else value[:keys]
            self.calc_kv_scales(query[:tokens], key[:keys], value)

    def calc_kv_scales(
        self, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> None:
        """Set the scales of a quantised cache from the largest query, key and value.

        It runs in the first step with tokens only, before the keys are written. It synchronizes
        with the device, because the scales are also stored on the host. Every row counts, so the
        caller leaves padding out. A layer that shares a cache does
        not measure; the layer that writes the cache does. If a tensor is all zero, its scale is
        1, because later values divided by a scale of 0 would be infinite. A scale that is NaN
        stays NaN, so that it is seen.

        Raises:
            ValueError: a tensor is missing or empty.
        """
        check_scale_inputs(query=query, key=key, value=value)
        for name, tensor in (("q", query), ("k", key), ("v", value)):
            assert tensor is not None
            largest: Tensor = getattr(self, f"{name}_range").to(tensor.device)
            scale = tensor.abs().max().float() / largest.float()
            scale = torch.where(scale == 0, torch.ones_like(scale), scale)
            setattr(self, f"_{name}_scale", scale)
            setattr(self, f"_{name}_scale_float", float(scale))
        self.calculate_kv_scales = False

    def load_kv_scales(
        self, k_scale: Tensor | float | None, v_scale: Tensor | float | None
    ) -> None:
        """Set the scales of a quantised cache to known values, such as a checkpoint's.

        Scales are not measured after that. Call it before the first step, because elements that
        are already in the cache are not rescaled. It has no effect in formats whose only scales
        are those that a write measures.

        Args:
            k_scale, v_scale: Optional. Factor of the cache's elements, or of its block scales: one
                number, or for elements [num_kv_heads]. If None, the scale is not changed.

        Raises:
            ValueError: a scale has another shape, or is not finite and above 0.
            TypeError: a scale is neither a number nor a tensor.
        """
        check_scale_types(k_scale=k_scale, v_scale=v_scale)
        for name, given in (("_k_scale", k_scale), ("_v_scale", v_scale)):
            if given is None:
                continue
            old: Tensor = getattr(self, name)
            scale = torch.as_tensor(given, dtype=torch.float32, device=old.device)
            heads = None if self._form.has_global_scale else self.num_kv_heads
            check_new_scale(name[1:], scale, heads)
            setattr(self, name, scale.clone())
            number = float(scale) if scale.numel() == 1 else None
            setattr(self, f"{name}_float", number)
        self.calculate_kv_scales = False

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Return the backend that runs the layer."""
        return self.attn_backend

    def get_kv_cache_spec(
        self, block_size: int, dtype: torch.dtype
    ) -> KVCacheSpec | None:
        """Return the content of a block of the layer's cache, or None if it has no cache.

        Args:
            block_size: slots per block.
            dtype: dtype of the model, and so of a cache that is not quantised.
        """
        form = self._form
        sizes = block_size, self.num_kv_heads, self.head_size, form.dtype or dtype
        stored: dict[str, Any] = (
            {"kv_cache_dtype": form.name} if form.is_measured else {}
        )
        if self.kv_sharing_target_layer_name is not None or self.attn_type in UNCACHED:
            return None
        if self.attn_type == AttentionType.ENCODER_DECODER:
            return CrossAttentionSpec(*sizes, **stored)
        if self.use_mla:
            return MLAAttentionSpec(*sizes, sliding_window=self.sliding_window)
        if self.attention_chunk_size is not None:
            chunk = self.attention_chunk_size
            return ChunkedLocalAttentionSpec(
                *sizes, attention_chunk_size=chunk, **stored
            )
        if self.sliding_window is not None:
            window = self.sliding_window
            return SlidingWindowSpec(*sizes, sliding_window=window, **stored)
        return FullAttentionSpec(*sizes, **stored)

    def extra_repr(self) -> str:
        """Return the layer's sizes and the class of its implementation."""
        return (
            f"head_size={self.head_size}, num_heads={self.num_heads},"
            f" num_kv_heads={self.num_kv_heads}, scale={self.impl.scale},"
            f" backend={type(self.impl).__name__}"
        )


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether the value of an option has no effect."""
    if value is None:
        return True
    return isinstance(value, str) and value == NEUTRAL_OPTIONS.get(name)
