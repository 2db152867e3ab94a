"""Readers: how a recorded backend's metadata, caches and implementations are read."""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.kinds import AttentionType
from ..step import StepTensors, step_tensors


class LayerView:
    """What the recorder reads of one call of a layer.

    Args:
        key_cache, value_cache: [num_blocks, block_size, kv_heads, head_size].
        scales: as in `RecordedWrite`.
        scale: factor of the dot products.
        options: the options of attention.
        writes: whether the call has written the new keys and values.
        num_tokens: new tokens, padding not counted.
        query_scale: as in `RecordedCall`.
        format_name: as in `RecordedWrite`.
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
        format_name: str | None = None,
    ) -> None:
        self.key_cache, self.value_cache = key_cache, value_cache
        self.scales = scales
        self.scale = scale
        self.options = options
        self.writes = writes
        self.num_tokens = num_tokens
        self.query_scale = query_scale
        self.format_name = format_name


class StepReader(Protocol):
    """How to read one engine's metadata.

    Attributes:
        reads_layers: whether caches and attention are compared. If not, the steps' metadata alone
            are checked, and layers run as they are.
    """

    @property
    def reads_layers(self) -> bool: ...

    def why_left_alone(self, builder: Any, layer_names: Sequence[str]) -> str:
        """Return why a builder's steps are not read; empty if they are. A builder is given once."""

    def step(self, builder: Any, common: Any) -> StepTensors | None:
        """Return a step's metadata; None if it is not checked."""

    def captured_step(self, builder: Any, common: Any) -> StepTensors | None:
        """Return the metadata of a graph that may be captured; None if it is not checked."""

    def scheduler_group(self, builder: Any) -> Hashable:
        """Return the name of a builder's rows in `Recorder.schedule_groups`."""


class Reader(StepReader, Protocol):
    """How to read one engine's metadata, caches and implementations."""

    def layer(
        self, impl: Any, layer: Any, kv_cache: Tensor, metadata: Any, query: Tensor
    ) -> LayerView | None:
        """Return what is read of a call; None if it is not checked."""


class EngineReader:
    """Reads the backends of `engine/backend_interface.py`."""

    reads_layers = True

    def why_left_alone(self, builder: Any, layer_names: Sequence[str]) -> str:
        """Return "": the steps of each builder are read."""
        return ""

    def step(self, builder: Any, common: Any) -> StepTensors | None:
        """Return a step's metadata; None for layers without a cache, and cross-attention."""
        spec = builder.kv_cache_spec
        if spec is None or common.cross_block_table_tensor is not None:
            return None
        window = getattr(spec, "sliding_window", None)
        return step_tensors(common, spec.block_size, window)

    captured_step = step

    def scheduler_group(self, builder: Any) -> Hashable:
        """Return 0: each step's rows are named so in `step`."""
        return 0

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
            format_name=cache.format_name,
        )


ENGINE_READER = EngineReader()
