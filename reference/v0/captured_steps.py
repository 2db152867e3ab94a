"""The captured steps of a model: the buffers they read, and the choice of the step to replay.

A twin adds how a step is recorded and how a live batch is written to its buffers.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ...contract.argument_types import typed
from ...contract.v0.graph_classes import CapturedStep, GraphInputBuffers, buffer_names
from ...contract.v0.sequence_classes import SequenceAttentionMetadata
from ...validation import check_positive
from ...validation.v0.graph import (
    check_capture_size,
    check_captured,
    check_capturing,
    check_decodes,
    check_has_buffers,
    check_step_inputs,
)


@typed
class CapturedSteps:
    """The buffers of captured decode steps, and the steps themselves."""

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
        """The batch sizes of the captured steps, in rising order."""
        return sorted(self._steps)

    def graph_capture(self, max_batch_size: int) -> AbstractContextManager[None]:
        """Return a context in which steps can be captured.

        Its buffers are allocated when it is entered and released when it is left. A captured
        step keeps its own views of them. An exception discards what the block has captured.

        Args:
            max_batch_size: requests of the largest step.

        Raises:
            RuntimeError: another block is open.
            ValueError: a number below 1.
        """
        check_positive(max_batch_size=max_batch_size)
        check_capturing("graph_capture", self.is_graph_capturing, expected=False)
        # step: allocate buffers with harmless values
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

    def graph_clone(self, batch_size: int) -> "CapturedSteps":
        """Return a new state with the same settings and no captured step.

        Args:
            batch_size: batch size that the new state is meant for; one that these buffers hold.

        Raises:
            RuntimeError: no `graph_capture` block is open.
            ValueError: the buffers do not hold that many requests.
        """
        self._open_buffers("graph_clone", batch_size)
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
            row too. Lengths on the host are the longest that a replay may have.

        Raises:
            RuntimeError: no `graph_capture` block is open.
            ValueError: the buffers do not hold that many requests.
        """
        buffers = self._open_buffers("graph_capture_get_metadata_for_batch", batch_size)
        # step: take the first rows of the buffers
        rows: dict[str, Any] = buffers.first(batch_size).present()
        starts = torch.arange(batch_size + 1, dtype=torch.int32, device=self.device)
        # step: declare the longest sequence of any replay
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

    def _open_buffers(self, caller: str, batch_size: int) -> GraphInputBuffers:
        """Return the buffers of the open block, which hold that many requests."""
        check_capturing(caller, self.is_graph_capturing)
        assert self._buffers is not None
        check_capture_size(batch_size, self._buffers.batch_size)
        return self._buffers

    def get_graph_input_buffers(
        self, attn_metadata: SequenceAttentionMetadata
    ) -> GraphInputBuffers:
        """Return the tensors of a captured step's metadata that a refill writes to.

        Args:
            attn_metadata: result of `graph_capture_get_metadata_for_batch`.

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
        """Write a batch into a captured step's buffers; a twin defines how."""
        raise NotImplementedError

    def capture(
        self, function: Callable[..., Tensor], batch_size: int, *inputs: Tensor
    ) -> None:
        """Capture a step of one batch size; a twin defines how."""
        raise NotImplementedError

    def replay(
        self, attn_metadata: SequenceAttentionMetadata, *inputs: Tensor
    ) -> Tensor:
        """Return the output of a captured step for another batch.

        Args:
            attn_metadata: decodes, at most as many as the largest captured step has.
            inputs: [num_decode_tokens, ...] as at the capture, one row per request.

        Returns:
            [num_decode_tokens, ...] the live rows of the step's output. The memory belongs to
            the step: the next replay, of any size, overwrites it.

        Raises:
            ValueError: no captured step is large enough, or `prepare_graph_input_buffers`
                rejects the batch.
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
        for buffer, values in zip(step.inputs, inputs, strict=True):
            buffer[:live].copy_(values, non_blocking=True)
            buffer[live:].zero_()
        # step: run it
        step.run()
        return step.output[:live]
