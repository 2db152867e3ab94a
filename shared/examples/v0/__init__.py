"""Worked examples of the forms of vLLM V0: one file per concept, and the names that they use."""

from typing import Any

from ...contract.v0.graph_classes import GraphInputBuffers
from ...contract.v0.sequence_classes import (
    SequenceAttentionMetadata,
    SequenceGroup,
    SequenceInput,
)

NAMES: dict[str, Any] = {
    "GraphInputBuffers": GraphInputBuffers,
    "SequenceAttentionMetadata": SequenceAttentionMetadata,
    "SequenceGroup": SequenceGroup,
    "SequenceInput": SequenceInput,
}
"""Classes of the contract that the examples name."""
