"""How does a step that was recorded once run again on other requests?

Here a step really is recorded, as a CUDA graph. A trial run on a stream of its own compiles the
kernels first, since a compilation cannot be recorded. All graphs take their memory from one pool:
only one runs at a time, so a small step works in the memory of a large one. A replay is a few
copies into the buffers and one launch.
"""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ...contract.graph_classes import (
    CAPTURE_VALUES,
    AttentionCGSupportInfo,
    CapturedStep,
    GraphInputBuffers,
    GroupSupport,
    buffer_names,
)
from ...contract.sequence_classes import SequenceAttentionMetadata
from ...validation import check_positive, values_checked
from ...validation.graph import (
    check_can_record,
    check_capture_size,
    check_captured,
    check_capturing,
    check_decodes,
    check_has_buffers,
    check_refill,
    check_step_inputs,
    check_step_output,
)


def get_attn_cg_support(
    attn_groups: Sequence[Sequence[GroupSupport]],
    checked_layer_names: AbstractSet[str] | None = None,
) -> AttentionCGSupportInfo:
    """Return what a model's backends can all capture."""
    # step: leave out what nobody asks about
    asked = [
        group
        for groups in attn_groups
        for group in groups
        if checked_layer_names is None
        or not checked_layer_names.isdisjoint(group.layer_names)
    ]
    # step: keep the weakest level and who brought it
    weakest = min(asked, key=lambda group: group.support.value, default=None)
    if weakest is None:
        return AttentionCGSupportInfo()
    return AttentionCGSupportInfo().narrow(weakest.support, weakest.backend)


class CommonAttentionState:
    """The buffers of captured decode steps, how they are refilled, and the steps themselves."""

    def __init__(
        self,
        max_blocks: int,
        max_seq_len_to_capture: int,
        device: torch.device | str = "cpu",
        is_encoder_decoder_model: bool = False,
    ) -> None:
        check_positive(
            max_blocks=max_blocks, max_seq_len_to_capture=max_seq_len_to_capture
        )
        self.max_blocks = max_blocks
        self.max_seq_len_to_capture = max_seq_len_to_capture
        self.device = torch.device(device)
        self.is_encoder_decoder_model = is_encoder_decoder_model
        self._buffers: GraphInputBuffers | None = None
        self._steps: dict[int, CapturedStep] = {}
        self._pool: Any = None

    @property
    def is_graph_capturing(self) -> bool:
        """Whether a `graph_capture` block is open."""
        return self._buffers is not None

    @property
    def captured_batch_sizes(self) -> list[int]:
        """The batch sizes of the captured steps, rising."""
        return sorted(self._steps)

    def graph_capture(self, max_batch_size: int) -> AbstractContextManager[None]:
        """Return a context in which steps can be captured."""
        check_positive(max_batch_size=max_batch_size)
        check_capturing("graph_capture", self.is_graph_capturing, expected=False)
        # step: make buffers whose values do no harm
        buffers = GraphInputBuffers.harmless(
            max_batch_size, self.max_blocks, self.is_encoder_decoder_model, self.device
        )
        return self._capturing(buffers)

    @contextmanager
    def _capturing(self, buffers: GraphInputBuffers) -> Iterator[None]:
        captured_before = dict(self._steps)
        self._buffers = buffers
        try:
            yield
        except BaseException:
            self._steps = captured_before
            raise
        finally:
            self._buffers = None

    def graph_clone(self, batch_size: int) -> "CommonAttentionState":
        """Return a new state with the same settings that has captured nothing."""
        self._room_for("graph_clone", batch_size)
        return type(self)(
            self.max_blocks,
            self.max_seq_len_to_capture,
            self.device,
            self.is_encoder_decoder_model,
        )

    def graph_capture_get_metadata_for_batch(
        self, batch_size: int
    ) -> SequenceAttentionMetadata:
        """Return the metadata to capture a step with; its tensors are the buffers' first rows."""
        buffers = self._room_for("graph_capture_get_metadata_for_batch", batch_size)
        # step: take the first rows of the buffers
        rows: dict[str, Any] = buffers.first(batch_size).present()
        starts = torch.arange(batch_size + 1, dtype=torch.int32, device=self.device)
        # step: promise the longest sequence there may be
        longest = self.max_seq_len_to_capture
        of_the_encoder: dict[str, Any] = {
            "encoder_seq_lens": [1] * batch_size,
            "max_encoder_seq_len": longest,
            "num_encoder_tokens": 0,
        }
        return SequenceAttentionMetadata(
            num_prefills=0,
            num_prefill_tokens=0,
            num_decode_tokens=batch_size,
            multi_modal_placeholder_index_maps=None,
            enable_kv_scales_calculation=True,
            max_decode_seq_len=longest,
            max_query_len=1,
            max_decode_query_len=1,
            query_start_loc=starts,
            use_cuda_graph=True,
            **rows,
            **(of_the_encoder if self.is_encoder_decoder_model else {}),
        )

    def _room_for(self, caller: str, batch_size: int) -> GraphInputBuffers:
        """Return the buffers, which hold so many requests."""
        check_capturing(caller, self.is_graph_capturing)
        assert self._buffers is not None
        check_capture_size(batch_size, self._buffers.batch_size)
        return self._buffers

    def get_graph_input_buffers(
        self, attn_metadata: SequenceAttentionMetadata
    ) -> GraphInputBuffers:
        """Return the tensors of a captured step's metadata that a refill writes to."""
        check_decodes(attn_metadata)
        names = buffer_names(self.is_encoder_decoder_model)
        check_has_buffers(attn_metadata, names)
        return GraphInputBuffers(
            **{name: getattr(attn_metadata, name) for name in names}
        )

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
            # step: copy the live batch to the front
            front = tuple(map(slice, batch.shape))
            buffer[front].copy_(batch, non_blocking=True)
            # step: put harmless values behind it
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
        # step: give the inputs a place that stays
        places = tuple(each.clone() for each in inputs)
        with torch.cuda.device(self.device):
            # step: run the step once, with values that do no harm
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                check_step_output(function(attn_metadata, *places), batch_size)
            torch.cuda.current_stream().wait_stream(stream)
            # step: record it
            if not self._steps:  # a pool ends with its last graph
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                output = function(attn_metadata, *places)
        buffers = self.get_graph_input_buffers(attn_metadata)
        self._steps[batch_size] = CapturedStep(
            attn_metadata, buffers, places, output, graph.replay
        )

    def replay(
        self, attn_metadata: SequenceAttentionMetadata, *inputs: Tensor
    ) -> Tensor:
        """Return what a captured step makes of another batch."""
        check_decodes(attn_metadata)
        live = attn_metadata.num_decode_tokens
        # step: choose the smallest step that holds the batch
        check_captured(live, self._steps)
        size = min(size for size in self._steps if size >= live)
        step = self._steps[size]
        check_step_inputs(inputs, live, step.inputs)
        # step: refill its buffers
        self.prepare_graph_input_buffers(step.input_buffers, attn_metadata)
        for place, values in zip(step.inputs, inputs, strict=True):
            place[:live].copy_(values, non_blocking=True)
            place[live:].zero_()
        # step: run it
        step.run()
        return step.output[:live]
