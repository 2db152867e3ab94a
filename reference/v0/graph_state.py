"""How does a step that was recorded once run again on other requests?

A decode launches many small kernels, and launching them takes longer than running them. A CUDA
graph records the launches once and replays them as one. But a replay repeats them exactly: the same
addresses, the same batch size. So the step reads its batch from buffers that never move; before
each replay the live batch is copied to their front, and what lies behind it gets values that do no
harm: no slot to store to, a sequence of one token. Steps of a few batch sizes are recorded, and a
batch runs in the smallest that holds it. Here nothing is recorded: a replay calls the function.
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
from ...validation import check_positive
from ...validation.graph import (
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
    """Return what a model's backends can all capture.

    Args:
        attn_groups: for each cache group its groups of layers; all run in one step.
        checked_layer_names: leave out groups without one of these layers; None: none.

    Returns:
        The weakest level, and the first backend that has it.

    Source:
        vLLM's function of that name.

    Example:
        >>> get_attn_cg_support(
        ...     [
        ...         [GroupSupport(AttentionCGSupport.ALWAYS, "TRITON", ("layer 0",))],
        ...         [GroupSupport(AttentionCGSupport.NEVER, "XFORMERS", ("layer 1",))],
        ...     ]
        ... ).min_cg_attn_backend
        'XFORMERS'
    """
    weakest = AttentionCGSupportInfo()
    for groups in attn_groups:
        for group in groups:
            # step: leave out what nobody asks about
            if checked_layer_names is not None and not any(
                name in checked_layer_names for name in group.layer_names
            ):
                continue
            # step: keep the weakest level and who brought it
            weakest = weakest.narrow(group.support, group.backend)
    return weakest


class CommonAttentionState:
    """The buffers of captured decode steps, how they are refilled, and the steps themselves.

    Args:
        max_blocks: width of the block tables: blocks of the longest sequence.
        max_seq_len_to_capture: longest sequence of a captured step, an encoder's included. The
            kernels are launched for it once and for all; longer ones run without a graph.
        device: where the cache lies.
        is_encoder_decoder_model: whether the steps also attend to an encoder's keys.

    Raises:
        ValueError: a number below 1.

    Source:
        vLLM's class of that name, which takes a model runner and shares its block table.

    Example:
        A step for four requests, refilled with two.

        >>> state = CommonAttentionState(max_blocks=3, max_seq_len_to_capture=12)
        >>> with state.graph_capture(max_batch_size=4):
        ...     captured = state.graph_capture_get_metadata_for_batch(4)
        >>> buffers = state.get_graph_input_buffers(captured)
        >>> batch = SequenceAttentionMetadata(
        ...     num_prefills=0,
        ...     num_prefill_tokens=0,
        ...     num_decode_tokens=2,
        ...     slot_mapping=torch.tensor([9, 32]),
        ...     multi_modal_placeholder_index_maps=None,
        ...     enable_kv_scales_calculation=False,
        ...     seq_lens_tensor=torch.tensor([6, 9], dtype=torch.int32),
        ...     max_decode_seq_len=9,
        ...     block_tables=torch.tensor(
        ...         [[7, 2, 0], [5, 6, 8]], dtype=torch.int32
        ...     ),
        ... )
        >>> state.prepare_graph_input_buffers(buffers, batch)
        >>> buffers.slot_mapping
        tensor([ 9, 32, -1, -1])
        >>> buffers.seq_lens_tensor
        tensor([6, 9, 1, 1], dtype=torch.int32)
        >>> captured.block_tables
        tensor([[7, 2, 0],
                [5, 6, 8],
                [0, 0, 0],
                [0, 0, 0]], dtype=torch.int32)
    """

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

    @property
    def is_graph_capturing(self) -> bool:
        """Whether a `graph_capture` block is open."""
        return self._buffers is not None

    @property
    def captured_batch_sizes(self) -> list[int]:
        """The batch sizes of the captured steps, rising."""
        return sorted(self._steps)

    def graph_capture(self, max_batch_size: int) -> AbstractContextManager[None]:
        """Return a context in which steps can be captured.

        Its buffers are made at its start and given up at its end, also after an exception; what
        was captured keeps its own part of them. An exception forgets what the block captured.

        Args:
            max_batch_size: requests of the largest step.

        Raises:
            RuntimeError: another block is open.
            ValueError: a number below 1.
        """
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
        """Return a new state with the same settings that has captured nothing.

        Args:
            batch_size: the size it is meant for; one that these buffers hold.

        Raises:
            RuntimeError: no `graph_capture` block is open.
            ValueError: the buffers do not hold that many requests.
        """
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
        """Return the metadata to capture a step with; its tensors are the buffers' first rows.

        Args:
            batch_size: decodes in the step, one new token each.

        Returns:
            Decodes only. The starts are 0, 1, 2, ...: every request has one token, a padding
            row too. Lengths on the host are the longest that a replay may bring.

        Raises:
            RuntimeError: no `graph_capture` block is open.
            ValueError: the buffers do not hold that many requests.
        """
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
        """Return the tensors of a captured step's metadata that a refill writes to.

        Args:
            attn_metadata: what `graph_capture_get_metadata_for_batch` returned.

        Raises:
            ValueError: a batch with prefills, or without decodes.
            TypeError: a tensor is missing.
        """
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
        """Write a batch into a captured step's buffers; nothing of older ones stays behind it.

        Args:
            input_buffers: changed: the batch comes first; behind it, and behind narrower rows
                of a table, stands what stood there at the capture.
            attn_metadata: decodes, at most as many as the buffers hold.

        Raises:
            ValueError: more requests, longer sequences or wider tables than were captured, or a
                batch that is not made of decodes; nothing is written.
            TypeError: a tensor is missing or has another dtype.

        Source:
            vLLM's method of that name, which leaves the slots to its caller, keeps what older
            batches left behind the batch, and copies one request to all rows.
        """
        check_refill(
            input_buffers,
            attn_metadata,
            self.max_seq_len_to_capture,
            self.is_encoder_decoder_model,
            contents=True,
        )
        live = attn_metadata.num_decode_tokens
        for name in buffer_names(self.is_encoder_decoder_model):
            buffer, batch = getattr(input_buffers, name), getattr(attn_metadata, name)
            if not buffer.numel():
                continue
            # step: copy the live batch to the front
            for request in range(live):
                if buffer.dim() == 1:
                    buffer[request] = batch[request]
                else:
                    buffer[request, : batch.shape[1]] = batch[request]
            # step: put harmless values behind it
            for request in range(live):
                if buffer.dim() == 2:
                    buffer[request, batch.shape[1] :] = CAPTURE_VALUES[name]
            for padding in range(live, input_buffers.batch_size):
                buffer[padding] = CAPTURE_VALUES[name]

    def capture(
        self, function: Callable[..., Tensor], batch_size: int, *inputs: Tensor
    ) -> None:
        """Capture a step of one batch size; an earlier one of that size is forgotten.

        Args:
            function: called as `function(attn_metadata, *inputs)`. It returns [batch_size, ...]
                and reads nothing else that changes from step to step. What it does with a
                padding row must not matter.
            batch_size: requests of the step. Large ones should be captured first, so that small
                ones find their memory used already.
            inputs: [batch_size, ...] what the function gets beside the metadata, such as a
                layer's query, key and value. The values serve for a trial run.

        Raises:
            RuntimeError: no `graph_capture` block is open.
            ValueError: a batch size that the buffers do not hold, or a result or inputs without
                one row a request.
            NotImplementedError: the twin was given a device without graphs.
        """
        attn_metadata = self.graph_capture_get_metadata_for_batch(batch_size)
        check_step_inputs(inputs, batch_size)
        # step: give the inputs a place that stays
        places = tuple(each.clone() for each in inputs)
        # step: run the step once, with values that do no harm
        output = function(attn_metadata, *places)
        check_step_output(output, batch_size)

        # step: record it
        def run() -> None:
            output.copy_(function(attn_metadata, *places))

        buffers = self.get_graph_input_buffers(attn_metadata)
        self._steps[batch_size] = CapturedStep(
            attn_metadata, buffers, places, output, run
        )

    def replay(
        self, attn_metadata: SequenceAttentionMetadata, *inputs: Tensor
    ) -> Tensor:
        """Return what a captured step makes of another batch.

        Args:
            attn_metadata: decodes, at most as many as the largest captured step has.
            inputs: [num_decode_tokens, ...] as at the capture, one row a request.

        Returns:
            [num_decode_tokens, ...] the live rows of the step's result. The memory is the
            step's own: the next replay, of any size, writes into it.

        Raises:
            ValueError: no captured step is large enough, or a batch that
                `prepare_graph_input_buffers` refuses.
        """
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
            place[:live] = values
            place[live:] = 0
        # step: run it
        step.run()
        return step.output[:live]
