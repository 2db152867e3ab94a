"""CUDA graph state: captured decode steps and the buffers they read.

A decode launches many small kernels, and the launches take longer than the kernels. A CUDA graph
records the launches once and replays them as one. A replay repeats them exactly, with the same
addresses and the same batch size. So the step reads its batch from buffers with fixed addresses.
Before each replay, the live batch is copied to their first rows, and the padding after it gets
harmless values: no slot to store to, a sequence of one token. Steps of a few batch sizes are
captured, and a batch runs in the smallest that holds it.

The reference records nothing: a replay calls the function.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

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
from ...validation.v0.graph import (
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
    """Return the weakest CUDA-graph support among a model's backends.

    Args:
        attn_groups: per cache group its groups of layers. All run in one step.
        checked_layer_names: Optional. Groups without one of these layers are ignored. If None,
            all groups count.

    Returns:
        The weakest level, and the first backend with that level.

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
            # step: skip groups without a requested layer
            if checked_layer_names is not None and not any(
                name in checked_layer_names for name in group.layer_names
            ):
                continue
            # step: keep the weakest level and its backend
            weakest = weakest.narrow(group.support, group.backend)
    return weakest


@typed
class CommonAttentionState(CapturedSteps):
    """The buffers of captured decode steps, how they are refilled, and the steps themselves.

    Args:
        max_blocks: width of the block tables: blocks of the longest sequence.
        max_seq_len_to_capture: longest sequence of a captured step, an encoder's included. The
            recorded kernels are launched for this length. Longer sequences run without a graph.
        device: device of the cache.
        is_encoder_decoder_model: whether the steps also attend to an encoder's keys.

    Raises:
        ValueError: a number is below 1.

    Source:
        vLLM's class of that name.

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

    def prepare_graph_input_buffers(
        self,
        input_buffers: GraphInputBuffers,
        attn_metadata: SequenceAttentionMetadata,
    ) -> None:
        """Write a batch into a captured step's buffers; nothing of older batches remains.

        Args:
            input_buffers: modified in place. The batch is written to the first rows. The rows
                after it, and the rest of narrower rows, get the values of the capture.
            attn_metadata: decodes, at most as many as the buffers hold.

        Raises:
            ValueError: more requests, longer sequences or wider tables than were captured, or a
                batch with prefills. Nothing is written.
            TypeError: a tensor is missing or has another dtype.

        Source:
            vLLM's method of that name.
        """
        check_refill(self, input_buffers, attn_metadata, contents=True)
        live = attn_metadata.num_decode_tokens
        for name in buffer_names(self.is_encoder_decoder_model):
            buffer, batch = getattr(input_buffers, name), getattr(attn_metadata, name)
            if not buffer.numel():
                continue
            # step: copy the live batch to the first rows
            for request in range(live):
                if buffer.dim() == 1:
                    buffer[request] = batch[request]
                else:
                    buffer[request, : batch.shape[1]] = batch[request]
            # step: fill the padding with harmless values
            for request in range(live):
                if buffer.dim() == 2:
                    buffer[request, batch.shape[1] :] = CAPTURE_VALUES[name]
            for padding in range(live, input_buffers.batch_size):
                buffer[padding] = CAPTURE_VALUES[name]

    def capture(
        self, function: Callable[..., Tensor], batch_size: int, *inputs: Tensor
    ) -> None:
        """Capture a step of one batch size; it replaces an earlier one of that size.

        Args:
            function: called as `function(attn_metadata, *inputs)`. It returns [batch_size, ...]
                and reads nothing else that changes from step to step. Its result for a padding
                row is ignored.
            batch_size: requests of the step. Capture large steps first, so that small ones
                reuse their memory.
            inputs: [batch_size, ...] further arguments of the function, such as a layer's query,
                key and value. Their values are used for a trial run.

        Raises:
            RuntimeError: no `graph_capture` block is open.
            ValueError: the buffers do not hold the batch size, or a result or input does not
                have one row per request.
            NotImplementedError: the optimized twin's device has no CUDA graphs.
        """
        attn_metadata = self.graph_capture_get_metadata_for_batch(batch_size)
        check_step_inputs(inputs, batch_size)
        # step: copy the inputs to persistent buffers
        static_inputs = tuple(tensor.clone() for tensor in inputs)
        # step: run the step once with harmless values
        output = function(attn_metadata, *static_inputs)
        check_step_output(output, batch_size)

        # step: record the step
        def run() -> None:
            output.copy_(function(attn_metadata, *static_inputs))

        buffers = self.get_graph_input_buffers(attn_metadata)
        self._steps[batch_size] = CapturedStep(
            attn_metadata, buffers, static_inputs, output, run
        )
