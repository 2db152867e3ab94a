"""The implementations and backends that a replay can run, by name.

An implementation (reference, optimized, a user's package) is run operation by operation. A backend
(triton, xformers) is run as an engine runs it: its builder makes the metadata of the step, and its
layer writes the cache and computes attention in one call.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...contract.metadata_classes import CommonAttentionMetadata
from ...contract.operations import Implementation
from ...contract.specs import KVCacheSpec
from ...engine.backend_interface import AttentionBackend
from ...recorder import RecordedOperations, Recorder, record_backend
from .batch import ReplayBatch
from .model import LayerInputs


@dataclass(frozen=True)
class StepMetadata:
    """The metadata that a twin built for a batch.

    Args:
        order: the batch's order, decodes first.
        common: the step's metadata.
        boundary: decodes, prefills, new tokens of the decodes, new tokens of the prefills.
        slots_on_device: the slot mapping, computed on the device of the block table.
        of_backend: the metadata of the backend's builder. None for an implementation.
    """

    order: list[int]
    common: CommonAttentionMetadata
    boundary: tuple[int, int, int, int]
    slots_on_device: Tensor
    of_backend: Any = None


class ReplayTwin(ABC):
    """One way to run a step. It keeps no state between steps."""

    writes_in_attend = False
    bits_of: object = None
    """Twins with equal values return the same bits. None: within the error budget."""

    def __init__(
        self,
        name: str,
        implementation: Implementation,
        device: torch.device | str,
    ) -> None:
        self.name = name
        self.implementation: Any = implementation
        self.device = torch.device(device)

    def record(self, recorder: Recorder) -> None:
        """Let a recorder check the steps from now on."""
        self.implementation = RecordedOperations(self.implementation, recorder)

    def metadata(self, batch: ReplayBatch) -> StepMetadata:
        """Return the metadata of a batch."""
        run = self.implementation
        common = run.build_common_attn_metadata(
            query_lens=batch.query_lens,
            num_computed_tokens=batch.num_computed_tokens,
            block_rows=batch.block_rows,
            block_size=batch.block_size,
            device=self.device,
        )
        return StepMetadata(
            order=run.reorder_batch_to_split_decodes_and_prefills(
                batch.scheduled_tokens
            ),
            common=common,
            boundary=run.split_decodes_and_prefills(common),
            slots_on_device=run.compute_slot_mapping_device(
                common.query_start_loc,
                common.num_computed_tokens_cpu.to(self.device),
                common.block_table_tensor,
                batch.block_size,
                batch.num_tokens,
            ),
        )

    @abstractmethod
    def write(self, inputs: LayerInputs, cache: Tensor, step: StepMetadata) -> None:
        """Write the new keys and values; `cache` is modified in place."""

    @abstractmethod
    def attend(self, inputs: LayerInputs, cache: Tensor, step: StepMetadata) -> Tensor:
        """Return the step's attention."""


class ImplementationTwin(ReplayTwin):
    """Runs the operations of an implementation one by one."""

    def write(self, inputs: LayerInputs, cache: Tensor, step: StepMetadata) -> None:
        """Write the new keys and values; `cache` is modified in place."""
        key_cache, value_cache = self.implementation.split_kv_cache(cache)
        self.implementation.reshape_and_cache(
            inputs.key, inputs.value, key_cache, value_cache, step.common.slot_mapping
        )

    def attend(self, inputs: LayerInputs, cache: Tensor, step: StepMetadata) -> Tensor:
        """Return the step's attention."""
        key_cache, value_cache = self.implementation.split_kv_cache(cache)
        out = torch.full_like(inputs.query, torch.nan)
        self.implementation.paged_attention(
            inputs.query,
            key_cache,
            value_cache,
            step.common.block_table_tensor,
            step.common.query_start_loc,
            step.common.seq_lens,
            step.common.max_query_len,
            step.common.max_seq_len,
            out=out,
        )
        return out


class BackendTwin(ReplayTwin):
    """Runs a backend through its builder and its layer, as an engine does."""

    writes_in_attend = True

    def __init__(
        self,
        name: str,
        implementation: Implementation,
        backend: type[AttentionBackend],
        spec: KVCacheSpec,
        query_heads: int,
        device: torch.device | str,
    ) -> None:
        super().__init__(name, implementation, device)
        self._backend, self._spec, self._query_heads = backend, spec, query_heads
        self._set_up(backend)

    def _set_up(self, backend: type[AttentionBackend]) -> None:
        spec = self._spec
        self._builder = backend.get_builder_cls()(spec, ["layer"], self.device)
        self._layer = backend.get_impl_cls()(
            self._query_heads, spec.head_size, spec.head_size**-0.5, spec.num_kv_heads
        )

    def record(self, recorder: Recorder) -> None:
        """Let a recorder check the steps from now on."""
        self._set_up(record_backend(self._backend, recorder))

    def metadata(self, batch: ReplayBatch) -> StepMetadata:
        """Return the metadata of a batch."""
        step = super().metadata(batch)
        built = self._builder.build(0, step.common)
        boundary = (
            built.num_decodes,
            built.num_prefills,
            built.num_decode_tokens,
            built.num_prefill_tokens,
        )
        return StepMetadata(
            step.order, step.common, boundary, step.slots_on_device, built
        )

    def write(self, inputs: LayerInputs, cache: Tensor, step: StepMetadata) -> None:
        """Do nothing, because the layer writes in `attend`."""

    def attend(self, inputs: LayerInputs, cache: Tensor, step: StepMetadata) -> Tensor:
        """Return the step's attention; `cache` is modified in place."""
        out = torch.full_like(inputs.query, torch.nan)
        self._layer.forward(
            None, inputs.query, inputs.key, inputs.value, cache, step.of_backend, out
        )
        return out
