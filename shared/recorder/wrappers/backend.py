"""record_backend: a subclass of an attention backend whose steps and layers the recorder checks.

It wraps the backends of `engine/backend_interface.py` and, with another reader, those of vLLM: both
have a builder that makes a step's metadata, and an implementation that runs a layer.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.kinds import AttentionType
from ..recorder import Recorder
from ..step import StepTensors


class LayerView:
    """What the recorder reads of one call of a layer.

    Args:
        key_cache, value_cache: [num_blocks, block_size, kv_heads, head_size].
        scales: `k_scale` and `v_scale` of an FP8 cache; empty for others.
        scale: factor of the dot products.
        options: the options of attention.
        writes: whether the call has written the new keys and values.
        num_tokens: new tokens, padding not counted.
    """

    def __init__(
        self,
        key_cache: Tensor,
        value_cache: Tensor,
        scales: dict[str, Any],
        scale: float,
        options: AttentionOptions,
        writes: bool,
        num_tokens: int,
    ) -> None:
        self.key_cache, self.value_cache = key_cache, value_cache
        self.scales = scales
        self.scale = scale
        self.options = options
        self.writes = writes
        self.num_tokens = num_tokens


class Reader(Protocol):
    """How to read one engine's metadata, caches and implementations."""

    def step(self, builder: Any, metadata: Any) -> StepTensors | None:
        """Return a step's metadata; None if it is not checked."""

    def layer(
        self, impl: Any, layer: Any, kv_cache: Tensor, metadata: Any, query: Tensor
    ) -> LayerView | None:
        """Return what is read of a call; None if it is not checked."""


class EngineReader:
    """Reads the backends of `engine/backend_interface.py`."""

    def step(self, builder: Any, metadata: Any) -> StepTensors | None:
        """Return a step's metadata; None for layers without a cache."""
        spec = builder.kv_cache_spec
        if spec is None or metadata.cross_block_table is not None:
            return None
        return StepTensors(
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            block_table=metadata.block_table,
            slot_mapping=metadata.slot_mapping,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            block_size=spec.block_size,
            window=getattr(spec, "sliding_window", None),
        )

    def layer(
        self, impl: Any, layer: Any, kv_cache: Tensor, metadata: Any, query: Tensor
    ) -> LayerView | None:
        """Return what is read of a call; None if nothing is cached or keys are an encoder's."""
        if impl.attn_type != AttentionType.DECODER:
            return None
        key_cache, value_cache = kv_cache.unbind(0)
        cache = impl.layer_cache(layer, key_cache, value_cache, query.dtype)
        rows = slice(0, metadata.num_actual_tokens)
        call = impl.paged_arguments(query[rows], cache, metadata, query[rows], None)
        return LayerView(
            cache.key,
            cache.value,
            cache.scales,
            impl.scale,
            call["options"],
            impl.kv_sharing_target_layer_name is None,
            metadata.num_actual_tokens,
        )


ENGINE_READER = EngineReader()


def record_backend(
    backend: Any, recorder: Recorder, reader: Reader = ENGINE_READER
) -> Any:
    """Return a subclass of a backend whose steps and layers are checked.

    Args:
        backend: an `AttentionBackend`, of this project or of vLLM.
        recorder: the recorder.
        reader: how its metadata and caches are read.
    """
    groups: dict[str, str] = {}
    if not recorder.implementation:
        recorder.implementation = backend.get_name()
    builder = _recorded_builder(backend.get_builder_cls(), recorder, reader, groups)
    impl = _recorded_impl(backend.get_impl_cls(), recorder, reader, groups)
    return type(
        f"Recorded{backend.__name__}",
        (backend,),
        {
            "get_builder_cls": staticmethod(lambda: builder),
            "get_impl_cls": staticmethod(lambda: impl),
            "builder_cls": builder,
            "impl_cls": impl,
        },
    )


def _recorded_builder(
    base: Any, recorder: Recorder, reader: Reader, groups: dict[str, str]
) -> Any:
    class RecordedBuilder(base):  # type: ignore[misc]
        """Begins a step of the recorder for each metadata object that it builds."""

        def __init__(self, kv_cache_spec: Any, layer_names: Any, *args: Any) -> None:
            super().__init__(kv_cache_spec, layer_names, *args)
            names = list(layer_names)
            self._group = names[0] if names else "layers"
            if len(names) > 1:
                self._group += f" to {names[-1]}"
            groups.update(dict.fromkeys(names, self._group))

        def build(self, *args: Any, **kwargs: Any) -> Any:
            metadata = super().build(*args, **kwargs)
            step = reader.step(self, metadata) if recorder.is_on else None
            if step is not None:
                recorder.begin_step(step, self._group)
            return metadata

        def build_for_cudagraph_capture(self, *args: Any, **kwargs: Any) -> Any:
            # the metadata of a capture are not a step
            was_on, recorder.is_on = recorder.is_on, False
            try:
                metadata = super().build_for_cudagraph_capture(*args, **kwargs)
            finally:
                recorder.is_on = was_on
            step = reader.step(self, metadata) if was_on else None
            if step is not None:
                recorder.begin_capture(step)
            return metadata

    return RecordedBuilder


def _recorded_impl(
    base: Any, recorder: Recorder, reader: Reader, groups: dict[str, str]
) -> Any:
    class RecordedImpl(base):  # type: ignore[misc]
        """Tells the recorder what each layer has written and computed."""

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor | None,
            value: Tensor | None,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            result = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            if attn_metadata is None or output is None or not recorder.is_on:
                return result
            if torch.compiler.is_compiling() or any(
                each is not None for each in (*args, *kwargs.values())
            ):
                # an output with a scale is not compared
                return result
            if recorder.wants_layers:
                tell_layer(
                    recorder,
                    reader,
                    groups,
                    (self, layer, kv_cache, attn_metadata),
                    (query, key, value, output),
                )
            return result

    return RecordedImpl


def tell_layer(
    recorder: Recorder,
    reader: Reader,
    groups: dict[str, str],
    called: tuple[Any, Any, Tensor, Any],
    tensors: tuple[Tensor, Tensor | None, Tensor | None, Tensor],
) -> None:
    """Tell the recorder what a layer has written and computed.

    Args:
        recorder, reader: as in `record_backend`.
        groups: the group of each layer by name.
        called: implementation, layer, its cache and the step's metadata.
        tensors: query, key, value and output.
    """
    impl, layer, kv_cache, metadata = called
    query, key, value, output = tensors
    view = recorder.own(lambda: reader.layer(impl, layer, kv_cache, metadata, query))
    if view is None:
        return
    name = getattr(layer, "layer_name", None) or "layer"
    group = groups.get(name) or next(iter(groups.values()), "layers")
    if view.writes:
        recorder.wrote(
            name, key, value, view.key_cache, view.value_cache, view.scales, group
        )
    # the queries of a captured graph include its padding
    tokens = query.shape[0] if recorder.is_capturing else view.num_tokens
    recorder.attended(
        name,
        query[:tokens],
        output[:tokens],
        view.key_cache,
        view.value_cache,
        view.scale,
        view.options,
        group,
    )
