"""Which steps can be captured, and what does a captured step hold on to?

A CUDA graph is a recording of kernel launches. Replaying it costs one launch, but every address and
every size is as it was: a replay sees new numbers only if they were written into the same memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum

import torch
from torch import Tensor

from .kinds import PAD_SLOT_ID
from .sequence_classes import SequenceAttentionMetadata
from .shapes import BlockTable, SlotMapping, TokenCounts


class AttentionCGSupport(Enum):
    """Which batches of a backend a CUDA graph can hold (vLLM's name), the weakest first."""

    NEVER = 0
    """None."""
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """One new token a request."""
    UNIFORM_BATCH = 2
    """As many new tokens for one request as for any other: decodes that verify drafts."""
    ALWAYS = 3
    """Any mixture of prefills and decodes."""


class CUDAGraphMode(Enum):
    """Which parts of a step run from a graph (vLLM's name).

    A pair holds the mode of a batch of decodes only, and that of any other batch.
    """

    NONE = 0
    PIECEWISE = 1
    """What lies between the attention layers."""
    FULL = 2
    """The whole step."""
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    def decode_mode(self) -> "CUDAGraphMode":
        """Return the mode of a batch of decodes only."""
        return CUDAGraphMode(self.value[0]) if isinstance(self.value, tuple) else self

    def mixed_mode(self) -> "CUDAGraphMode":
        """Return the mode of a batch with a prefill in it."""
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self


@dataclass(frozen=True)
class GroupSupport:
    """What the layers that share one metadata builder can capture.

    Args:
        support: the level of the builder.
        backend: name of the backend.
        layer_names: the layers.
    """

    support: AttentionCGSupport
    backend: str
    layer_names: tuple[str, ...]


@dataclass(frozen=True)
class AttentionCGSupportInfo:
    """The weakest level among some backends, and who is to blame (vLLM's name).

    Args:
        min_cg_support: the level.
        min_cg_attn_backend: the first backend of that level; None if nothing limits it.
    """

    min_cg_support: AttentionCGSupport = AttentionCGSupport.ALWAYS
    min_cg_attn_backend: str | None = None

    def narrow(
        self, support: AttentionCGSupport, backend: str
    ) -> "AttentionCGSupportInfo":
        """Return the weaker of this and another level; on a tie, this one.

        Example:
            >>> weak = AttentionCGSupport.NEVER
            >>> AttentionCGSupportInfo().narrow(weak, "A").min_cg_attn_backend
            'A'
        """
        if support.value < self.min_cg_support.value:
            return AttentionCGSupportInfo(support, backend)
        return self


CAPTURE_VALUES = {
    "slot_mapping": PAD_SLOT_ID,
    "seq_lens_tensor": 1,
    "block_tables": 0,
    "encoder_seq_lens_tensor": 1,
    "cross_slot_mapping": PAD_SLOT_ID,
    "cross_block_tables": 1,
}
"""What stands in each buffer where no request does.

A request of these numbers stores nothing and sees one key, the first of a block that every cache
has: one that holds an encoder's keys too has at least two. Lengths are not 0, since a request has
its new token at least.
"""


def buffer_names(is_encoder_decoder_model: bool) -> tuple[str, ...]:
    """Return the names of the buffers that a step reads: metadata's own, in one order."""
    names = tuple(CAPTURE_VALUES)
    return names if is_encoder_decoder_model else names[:3]


@dataclass(frozen=True, eq=False)
class GraphInputBuffers:
    """The memory that one captured step reads its batch from, named as in the metadata.

    Args:
        slot_mapping: [batch_size] slot of each request's new token.
        seq_lens_tensor: [batch_size] tokens of each sequence, the new one included.
        block_tables: [batch_size, max_blocks].
        encoder_seq_lens_tensor: [batch_size] tokens of each encoder sequence; None without an
            encoder, as the two below.
        cross_slot_mapping: [0]: a decode writes no encoder token.
        cross_block_tables: [batch_size, max_blocks] blocks that hold the encoder's keys.
    """

    slot_mapping: SlotMapping
    seq_lens_tensor: TokenCounts
    block_tables: BlockTable
    encoder_seq_lens_tensor: TokenCounts | None = None
    cross_slot_mapping: SlotMapping | None = None
    cross_block_tables: BlockTable | None = None

    @classmethod
    def harmless(
        cls,
        batch_size: int,
        max_blocks: int,
        is_encoder_decoder_model: bool,
        device: torch.device,
    ) -> "GraphInputBuffers":
        """Return new buffers that hold CAPTURE_VALUES and no request.

        Args:
            batch_size, max_blocks: their rows, and the width of the tables.
            is_encoder_decoder_model: whether there are buffers for an encoder's keys.
            device: where they shall lie.
        """
        buffers = {}
        for name in buffer_names(is_encoder_decoder_model):
            dtype = torch.int64 if name.endswith("slot_mapping") else torch.int32
            rows = 0 if name == "cross_slot_mapping" else batch_size
            shape = (rows, max_blocks) if name.endswith("tables") else (rows,)
            buffers[name] = torch.full(
                shape, CAPTURE_VALUES[name], dtype=dtype, device=device
            )
        return cls(**buffers)

    @property
    def batch_size(self) -> int:
        """Requests that they have room for."""
        return self.seq_lens_tensor.shape[0]

    def present(self) -> dict[str, Tensor]:
        """Return the buffers there are, by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def first(self, batch_size: int) -> "GraphInputBuffers":
        """Return the first rows of each buffer, in the same memory."""
        rows = {name: each[:batch_size] for name, each in self.present().items()}
        return GraphInputBuffers(**rows)


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A recorded step of one batch size.

    Args:
        metadata: what it was recorded with. A graph remembers addresses and keeps nothing
            alive, so every tensor that the step reads has to be kept here.
        input_buffers: where it reads the batch from.
        inputs: [batch_size, ...] where it reads everything else from.
        output: [batch_size, ...] where its result stands once it has run.
        run: runs it on what the buffers hold.
    """

    metadata: SequenceAttentionMetadata
    input_buffers: GraphInputBuffers
    inputs: tuple[Tensor, ...]
    output: Tensor
    run: Callable[[], None]
