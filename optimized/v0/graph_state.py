"""CUDA graph state: captured decode steps and the buffers they read.

A step is recorded as a CUDA graph. A trial run on a separate stream compiles the kernels first,
since a compilation cannot be recorded. All graphs share one memory pool: only one runs at a time,
so a small step reuses the memory of a large one. A replay is a few copies to the buffers and one
launch.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from ...contract.argument_types import typed
from ...contract.graph_support import AttentionCGSupportInfo, GroupSupport
from ...contract.v0.graph_classes import (
    CAPTURE_VALUES,
    CapturedStep,
    GraphInputBuffers,
    buffer_names,
)
from ...contract.v0.sequence_classes import SequenceAttentionMetadata
from ...validation import values_checked
from ...validation.v0.graph import (
    check_can_record,
    check_refill,
    check_step_inputs,
    check_step_output,
)
from ..v0.captured_steps import CapturedSteps


@typed
def get_attn_cg_support(
    attn_groups: Sequence[Sequence[GroupSupport]],
    checked_layer_names: AbstractSet[str] | None = None,
) -> AttentionCGSupportInfo:
    """Return the weakest CUDA-graph support among a model's backends."""
    # step: skip groups without a requested layer
    asked = [
        group
        for groups in attn_groups
        for group in groups
        if checked_layer_names is None
        or not checked_layer_names.isdisjoint(group.layer_names)
    ]
    # step: keep the weakest level and its backend
    weakest = min(asked, key=lambda group: group.support.value, default=None)
    if weakest is None:
        return AttentionCGSupportInfo()
    return AttentionCGSupportInfo().narrow(weakest.support, weakest.backend)


@typed
class CommonAttentionState(CapturedSteps):
    """The buffers of captured decode steps, how they are refilled, and the steps themselves."""

    # the memory pool of all graphs; set by the first capture
    _pool: Any = None

    def prepare_graph_input_buffers(
        self,
        input_buffers: GraphInputBuffers,
        attn_metadata: SequenceAttentionMetadata,
    ) -> None:
        """Write a batch into a captured step's buffers; nothing of older batches remains."""
        check_refill(
            self, input_buffers, attn_metadata, contents=values_checked(self.device)
        )
        live = attn_metadata.num_decode_tokens
        for name in buffer_names(self.is_encoder_decoder_model):
            buffer, batch = getattr(input_buffers, name), getattr(attn_metadata, name)
            if not buffer.numel():
                continue
            # step: copy the live batch to the first rows
            live_rows = tuple(map(slice, batch.shape))
            buffer[live_rows].copy_(batch, non_blocking=True)
            # step: fill the padding with harmless values
            padding = [buffer[live:]]
            if buffer.dim() == 2:
                padding.append(buffer[:live, batch.shape[1] :])
            for unused in padding:
                if unused.numel():
                    unused.fill_(CAPTURE_VALUES[name])

    def capture(
        self, function: Callable[..., Tensor], batch_size: int, *inputs: Tensor
    ) -> None:
        """Capture a step of one batch size; it replaces an earlier one of that size.

        Raises:
            NotImplementedError: the device is not CUDA; the reference needs no graph.
            ValueError: PAGETWIN_CHECK_VALUES=1. Its checks would read tensors during capture.
        """
        attn_metadata = self.graph_capture_get_metadata_for_batch(batch_size)
        check_step_inputs(inputs, batch_size)
        check_can_record(self.device, values_checked(self.device))
        # step: copy the inputs to persistent buffers
        static_inputs = tuple(tensor.clone() for tensor in inputs)
        with torch.cuda.device(self.device):
            # step: run the step once with harmless values
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                check_step_output(function(attn_metadata, *static_inputs), batch_size)
            torch.cuda.current_stream().wait_stream(stream)
            # step: record the step
            if not self._steps:  # a pool is freed with its last graph
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                output = function(attn_metadata, *static_inputs)
        buffers = self.get_graph_input_buffers(attn_metadata)
        self._steps[batch_size] = CapturedStep(
            attn_metadata, buffers, static_inputs, output, graph.replay
        )
