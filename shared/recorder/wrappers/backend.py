"""record_backend: a subclass of an attention backend whose steps and layers the recorder checks.

It wraps the backends of `engine/backend_interface.py` and, with another reader, those of vLLM: both
have a builder that makes a step's metadata, and an implementation that runs a layer.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.kinds import AttentionType
from ..environment import recorder_from_environment
from ..recorder import Recorder
from ..settings import RECORD_VARIABLE
from ..step import StepTensors, step_tensors


class LayerView:
    """What the recorder reads of one call of a layer.

    Args:
        key_cache, value_cache: [num_blocks, block_size, kv_heads, head_size].
        scales: `k_scale` and `v_scale` of an FP8 cache; empty for others.
        scale: factor of the dot products.
        options: the options of attention.
        writes: whether the call has written the new keys and values.
        num_tokens: new tokens, padding not counted.
        query_scale: as in `RecordedCall`.
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
        query_scale: Tensor | None = None,
    ) -> None:
        self.key_cache, self.value_cache = key_cache, value_cache
        self.scales = scales
        self.scale = scale
        self.options = options
        self.writes = writes
        self.num_tokens = num_tokens
        self.query_scale = query_scale


class StepReader(Protocol):
    """How to read one engine's metadata.

    Attributes:
        reads_layers: whether caches and attention are compared. If not, the steps' metadata alone
            are checked, and layers run as they are.
    """

    @property
    def reads_layers(self) -> bool: ...

    def takes(self, builder: Any, layer_names: Sequence[str]) -> bool:
        """Return whether a builder's steps are read. A new builder is given once."""

    def step(self, builder: Any, common: Any) -> StepTensors | None:
        """Return a step's metadata; None if it is not checked."""


class Reader(StepReader, Protocol):
    """How to read one engine's metadata, caches and implementations."""

    def layer(
        self, impl: Any, layer: Any, kv_cache: Tensor, metadata: Any, query: Tensor
    ) -> LayerView | None:
        """Return what is read of a call; None if it is not checked."""


class EngineReader:
    """Reads the backends of `engine/backend_interface.py`."""

    reads_layers = True

    def takes(self, builder: Any, layer_names: Sequence[str]) -> bool:
        """Return True: the steps of each builder are read."""
        return True

    def step(self, builder: Any, common: Any) -> StepTensors | None:
        """Return a step's metadata; None for layers without a cache, and cross-attention."""
        spec = builder.kv_cache_spec
        if spec is None or common.cross_block_table_tensor is not None:
            return None
        window = getattr(spec, "sliding_window", None)
        return step_tensors(common, spec.block_size, window)

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


class StepGroups:
    """The groups of layers of one backend: which metadata object belongs to which group."""

    def __init__(self) -> None:
        self._of_layer: dict[str, str] = {}
        self._built: dict[str, Any] = {}

    def add(self, layer_names: Sequence[str]) -> str:
        """Return the name of a new group; numbered if another engine has one of that name."""
        name = " to ".join(dict.fromkeys([*layer_names[:1], *layer_names[-1:]]))
        group, number = name or "layers", 2
        while group in self._built:
            group, number = f"{name} ({number})", number + 1
        self._built[group] = None
        self._of_layer.update(dict.fromkeys(layer_names, group))
        return group

    def built(self, group: str, metadata: Any) -> None:
        """Note the current metadata of a group."""
        self._built[group] = metadata

    def find(self, metadata: Any, layer_name: str) -> str | None:
        """Return the group of a call: by its metadata, or by the layer if they are a copy."""
        for group, built in self._built.items():
            if built is metadata:
                return group
        return self.of_layer(layer_name)

    def of_layer(self, layer_name: str) -> str | None:
        """Return the group of a layer; the only group if the name is not known."""
        only = next(iter(self._built)) if len(self._built) == 1 else None
        return self._of_layer.get(layer_name, only)


def record_backend(
    backend: Any,
    recorder: Recorder,
    reader: StepReader = ENGINE_READER,
    recorded_impl: Callable[[Any, Recorder, Any, StepGroups], Any] | None = None,
) -> Any:
    """Return a subclass of a backend whose steps and layers are checked.

    Args:
        backend: an `AttentionBackend`, of this project or of vLLM.
        recorder: the recorder.
        reader: how its metadata and caches are read.
        recorded_impl: Optional. Returns the recorded subclass of an implementation. If None, that
            of an implementation whose layers write and attend in `forward`.
    """
    groups = StepGroups()
    if not recorder.implementation:
        recorder.implementation = backend.get_name()
    builder = _recorded_builder(backend.get_builder_cls(), recorder, reader, groups)
    impl = backend.get_impl_cls()
    if reader.reads_layers:
        wrap: Any = recorded_impl or _recorded_impl
        impl = wrap(impl, recorder, reader, groups)
    return type(
        f"Recorded{backend.__name__}",
        (backend,),
        {
            "get_builder_cls": staticmethod(lambda: builder),
            "get_impl_cls": staticmethod(lambda: impl),
            "builder_cls": builder,
            "impl_cls": impl,
            "recorder": recorder,
        },
    )


_FROM_ENVIRONMENT: dict[tuple[Any, str], Any] = {}


def backend_from_environment(backend: Any) -> Any:
    """Return a recorded backend if PAGETWIN_RECORD is set, otherwise the backend itself.

    All layers of a process that ask for the same backend get the same class and recorder.

    Args:
        backend: an `AttentionBackend` of this project.
    """
    folder = os.environ.get(RECORD_VARIABLE, "")
    if not folder or hasattr(backend, "recorder"):
        return backend
    key = (backend, folder)
    if key not in _FROM_ENVIRONMENT:
        recorder = recorder_from_environment(backend.get_name())
        recorded = backend if recorder is None else record_backend(backend, recorder)
        _FROM_ENVIRONMENT[key] = recorded
    return _FROM_ENVIRONMENT[key]


def _recorded_builder(
    base: Any, recorder: Recorder, reader: StepReader, groups: StepGroups
) -> Any:
    class RecordedBuilder(base):  # type: ignore[misc]
        """Begins a step of the recorder for each step whose metadata it builds."""

        def __init__(
            self, kv_cache_spec: Any, layer_names: Any, *args: Any, **kwargs: Any
        ) -> None:
            super().__init__(kv_cache_spec, layer_names, *args, **kwargs)
            self.recorded_layers = tuple(layer_names)
            self._buffers: list[Any] = []
            self._captures = False
            self._recorded_group = ""
            if recorder.own(lambda: reader.takes(self, layer_names)):
                self._recorded_group = groups.add(list(layer_names))
                recorder.attach()

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            common = common_attn_metadata
            metadata = super().build(common_prefix_len, common, *args, **kwargs)
            if not self._recorded_group:
                return metadata
            groups.built(self._recorded_group, metadata)
            step = recorder.own(lambda: reader.step(self, common))
            if step is not None and not self._captures:
                recorder.begin_step(step, self._recorded_group)
            return metadata

        def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
            common = common_attn_metadata
            # the metadata of a capture are not a step
            self._captures = True
            try:
                metadata = super().build_for_cudagraph_capture(common)
            finally:
                self._captures = False
            if not self._recorded_group:
                return metadata
            groups.built(self._recorded_group, metadata)
            step = recorder.own(lambda: reader.step(self, common))
            if step is not None:
                # the graphs of an engine live as long as its builders
                self._buffers.append(recorder.begin_capture(step))
            return metadata

    return RecordedBuilder


def _recorded_impl(
    base: Any, recorder: Recorder, reader: Reader, groups: StepGroups
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
            tensors = (query, key, value, kv_cache, attn_metadata, output)
            result = super().forward(layer, *tensors, *args, **kwargs)
            if attn_metadata is None or output is None or not recorder.wants_layers:
                return result
            # a compiled graph is not interrupted, and an FP8 output is not compared
            scales = [each for each in (*args, *kwargs.values()) if each is not None]
            if torch.compiler.is_compiling() or scales:
                return result
            _tell(
                recorder,
                recorder.own(
                    lambda: reader.layer(self, layer, kv_cache, attn_metadata, query)
                ),
                getattr(layer, "layer_name", None) or "layer",
                groups.find(attn_metadata, getattr(layer, "layer_name", "")),
                (query, key, value, output),
            )
            return result

    return RecordedImpl


def _tell(
    recorder: Recorder,
    view: LayerView | None,
    name: str,
    group: str | None,
    tensors: tuple[Tensor, Tensor | None, Tensor | None, Tensor],
) -> None:
    """Tell the recorder what a layer has written and computed, if the call is one to check."""
    if view is None or group is None:
        return
    query, key, value, output = tensors
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
        view.query_scale,
    )
