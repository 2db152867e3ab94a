"""record_backend: a subclass of an attention backend whose steps and layers the recorder checks.

It wraps the backends of `engine/backend_interface.py` and, with another reader, those of vLLM: both
have a builder that makes a step's metadata, and an implementation that runs a layer.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..environment import recorder_from_environment
from ..recorder import Recorder
from ..reports import LOGGER
from ..settings import RECORD_VARIABLE
from ..step import StepTensors
from .readers import ENGINE_READER, LayerView, Reader, StepReader


class StepGroups:
    """The groups of layers of one backend: which metadata object belongs to which group."""

    def __init__(self) -> None:
        self._of_layer: dict[str, str | None] = {}
        self._built: dict[str, Any] = {}
        self._steps: dict[str, StepTensors | None] = {}

    def add(self, layer_names: Sequence[str]) -> str:
        """Return the name of a new group; numbered if another engine has one of that name."""
        name = " to ".join(dict.fromkeys([*layer_names[:1], *layer_names[-1:]]))
        group, number = name or "layers", 2
        while group in self._built:
            group, number = f"{name} ({number})", number + 1
        self._built[group] = None
        self._of_layer.update(dict.fromkeys(layer_names, group))
        return group

    def leave_out(self, layer_names: Sequence[str]) -> None:
        """Note layers that belong to no group, since their steps are not read."""
        self._of_layer.update(dict.fromkeys(layer_names))

    def built(self, group: str, metadata: Any, step: StepTensors | None = None) -> None:
        """Note the current metadata of a group, and the recorder's form of them if it has one."""
        self._built[group], self._steps[group] = metadata, step

    def step_of(self, metadata: Any) -> StepTensors | None:
        """Return the recorder's form of current metadata; None if there is none."""
        return self._steps.get(self._group_of(metadata) or "")

    def find(self, metadata: Any, layer_name: str) -> str | None:
        """Return the group of a call: by its metadata, or by the layer if they are a copy."""
        return self._group_of(metadata) or self.of_layer(layer_name)

    def _group_of(self, metadata: Any) -> str | None:
        """Return the group whose current metadata these are; None if they are of no group."""
        for group, built in self._built.items():
            if built is metadata:
                return group
        return None

    def of_layer(self, layer_name: str) -> str | None:
        """Return the group of a layer; the only group if the name is not known.

        None if the layer was left out, or if there are several groups and the name is not known.
        """
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
            self._graphs: dict[int, object] = {}
            """What holds the buffers of the engine's graphs, which live as long as its builders."""
            self._captures = False
            self._recorded_group = ""
            reason = recorder.own(lambda: reader.why_left_alone(self, layer_names))
            if reason == "":
                self._recorded_group = groups.add(list(layer_names))
                recorder.attach()
                return
            groups.leave_out(layer_names)
            if reason is not None:
                name = next(iter(layer_names), "a group")
                LOGGER.warning(
                    "flight recorder: the layers of %s are not checked: %s",
                    name,
                    reason,
                )

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
            step = recorder.own(lambda: reader.step(self, common))
            self._begin(metadata, None if self._captures else step)
            return metadata

        def update_block_table(
            self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor
        ) -> Any:
            built = super().update_block_table(metadata, blk_table, slot_mapping)

            def other_blocks() -> StepTensors | None:
                step = groups.step_of(metadata)
                return step and replace(
                    step,
                    block_table=blk_table[: step.seq_lens.shape[0]],
                    slot_mapping=slot_mapping[: step.slot_mapping.shape[0]],
                    scheduler_group=reader.scheduler_group(self),
                )

            if self._recorded_group:
                self._begin(built, recorder.own(other_blocks))
            return built

        def _begin(self, metadata: Any, step: StepTensors | None) -> None:
            """Note metadata, and begin their step unless they are of a dummy run or a capture."""
            groups.built(self._recorded_group, metadata, step)
            if step is not None:
                recorder.begin_step(step, self._recorded_group)

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
            step = recorder.own(lambda: reader.captured_step(self, common))
            if step is not None:
                graph = recorder.begin_capture(step, self._recorded_group)
                self._graphs[id(graph)] = graph
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
            scales = [
                argument
                for argument in (*args, *kwargs.values())
                if argument is not None
            ]
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
            name, key, value, view.key_cache, view.value_cache, view.scales, group,
            format_name=view.format_name,
        )  # fmt: skip
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
