"""CUDA graphs of vLLM V0's form: input buffers and captured steps.

A replay uses the addresses of the capture, so each batch is written to the same buffers.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..kinds import PAD_SLOT_ID
from ..shapes import BlockTable, SlotMapping, TokenCounts
from .sequence_classes import SequenceAttentionMetadata

CAPTURE_VALUES = {
    "slot_mapping": PAD_SLOT_ID,
    "seq_lens_tensor": 1,
    "block_tables": 0,
    "encoder_seq_lens_tensor": 1,
    "cross_slot_mapping": PAD_SLOT_ID,
    "cross_block_tables": 1,
}
"""The value of each buffer in padding rows.

A request with these values stores nothing and reads one key, the first of a block that every cache
has. The block of cross tables is 1 as in vLLM; block 0 would be as harmless. A cache that also
holds an encoder's keys has at least two blocks. Lengths are not 0, since a request has at least its
new token.
"""


def buffer_names(is_encoder_decoder_model: bool) -> tuple[str, ...]:
    """Return the names of the metadata fields that are buffers of a step, in order."""
    names = tuple(CAPTURE_VALUES)
    return names if is_encoder_decoder_model else names[:3]


@dataclass(frozen=True, eq=False)
class GraphInputBuffers:
    """The buffers from which a captured step reads its batch, named as in the metadata.

    Args:
        slot_mapping: [batch_size] slot of each request's new token.
        seq_lens_tensor: [batch_size] tokens of each sequence, the new one included.
        block_tables: [batch_size, max_blocks].
        encoder_seq_lens_tensor: Optional. [batch_size] tokens of each encoder sequence. None
            without an encoder, as the following two.
        cross_slot_mapping: Optional. [0], as a decode writes no encoder token.
        cross_block_tables: Optional. [batch_size, max_blocks] blocks of the encoder's keys.
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
        """Return new buffers filled with CAPTURE_VALUES.

        Args:
            batch_size, max_blocks: number of rows, and width of the tables.
            is_encoder_decoder_model: whether there are buffers for an encoder's keys.
            device: device of the buffers.
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
        """Number of requests that the buffers hold."""
        return self.seq_lens_tensor.shape[0]

    def present(self) -> dict[str, Tensor]:
        """Return the buffers that are not None, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def first(self, batch_size: int) -> "GraphInputBuffers":
        """Return the first rows of each buffer, in the same memory."""
        rows = {name: buffer[:batch_size] for name, buffer in self.present().items()}
        return GraphInputBuffers(**rows)


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A recorded step of one batch size.

    Args:
        metadata: metadata of the capture. A graph does not keep its tensors alive, so every
            tensor that the step reads is referenced here.
        input_buffers: buffers of the batch.
        inputs: [batch_size, ...] buffers of the other inputs.
        output: [batch_size, ...] buffer of the result.
        run: runs the step on the content of the buffers.
    """

    metadata: SequenceAttentionMetadata
    input_buffers: GraphInputBuffers
    inputs: tuple[Tensor, ...]
    output: Tensor
    run: Callable[[], None]
