"""CUDA graph state: captured decode steps and the buffers they read.

Here a step really is recorded, as a CUDA graph. A trial run on a stream of its own compiles the
kernels first, since a compilation cannot be recorded. All graphs take their memory from one pool:
only one runs at a time, so a small step works in the memory of a large one. A replay is a few
copies into the buffers and one launch.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from ...bookkeeping.v0.graph_state import CapturedSteps
from ...contract.graph_classes import (
    CAPTURE_VALUES,
    AttentionCGSupportInfo,
    CapturedStep,
    GraphInputBuffers,
    GroupSupport,
    buffer_names,
)
from ...contract.sequence_classes import SequenceAttentionMetadata
from ...validation import values_checked
from ...validation.graph import (
    check_can_record,
    check_refill,
    check_step_inputs,
    check_step_output,
)


def get_attn_cg_support(
    attn_groups: Sequence[Sequence[GroupSupport]],
    checked_layer_names: AbstractSet[str] | None = None,
) -> AttentionCGSupportInfo:
    """Return what a model's backends can all capture."""
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


class CommonAttentionState(CapturedSteps):
    """The buffers of captured decode steps, how they are refilled, and the steps themselves."""

    # the memory pool of all graphs; set by the first capture
    _pool: Any = None

    def prepare_graph_input_buffers(
        self,
        input_buffers: GraphInputBuffers,
        attn_metadata: SequenceAttentionMetadata,
    ) -> None:
        """Write a batch into a captured step's buffers; nothing of older ones stays behind it."""
        check_refill(
            input_buffers,
            attn_metadata,
            self.max_seq_len_to_capture,
            self.is_encoder_decoder_model,
            contents=values_checked(),
        )
        live = attn_metadata.num_decode_tokens
        for name in buffer_names(self.is_encoder_decoder_model):
            buffer, batch = getattr(input_buffers, name), getattr(attn_metadata, name)
            if not buffer.numel():
                continue
            # step: copy the live batch to the first rows
            front = tuple(map(slice, batch.shape))
            buffer[front].copy_(batch, non_blocking=True)
            # step: fill the padding with harmless values
            behind = [buffer[live:]]
            if buffer.dim() == 2:
                behind.append(buffer[:live, batch.shape[1] :])
            for rest in behind:
                if rest.numel():
                    rest.fill_(CAPTURE_VALUES[name])

    def capture(
        self, function: Callable[..., Tensor], batch_size: int, *inputs: Tensor
    ) -> None:
        """Capture a step of one batch size; an earlier one of that size is forgotten.

        Raises:
            NotImplementedError: the device is not CUDA; the reference needs no graph.
            ValueError: PAGETWIN_CHECK_VALUES=1, whose checks would read tensors while recording.
        """
        attn_metadata = self.graph_capture_get_metadata_for_batch(batch_size)
        check_step_inputs(inputs, batch_size)
        check_can_record(self.device, values_checked())
        # step: copy the inputs to persistent buffers
        places = tuple(each.clone() for each in inputs)
        with torch.cuda.device(self.device):
            # step: run the step once with harmless values
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                check_step_output(function(attn_metadata, *places), batch_size)
            torch.cuda.current_stream().wait_stream(stream)
            # step: record the step
            if not self._steps:  # a pool ends with its last graph
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                output = function(attn_metadata, *places)
        buffers = self.get_graph_input_buffers(attn_metadata)
        self._steps[batch_size] = CapturedStep(
            attn_metadata, buffers, places, output, graph.replay
        )
