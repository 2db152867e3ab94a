"""CUDA graphs: which batches a backend supports, and which parts of a step run from a graph.

A CUDA graph is a recording of kernel launches. A replay costs one launch, but uses the recorded
addresses and sizes. It uses new values only if they were written to the same memory.
"""

from dataclasses import dataclass
from enum import Enum


class AttentionCGSupport(Enum):
    """The batches of a backend that can be captured (vLLM's name), the weakest level first."""

    NEVER = 0
    """None."""
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """One new token per request."""
    UNIFORM_BATCH = 2
    """The same number of new tokens for all requests, as in speculative decoding."""
    ALWAYS = 3
    """Any mixture of prefills and decodes."""


class CUDAGraphMode(Enum):
    """The parts of a step that run from a graph (vLLM's name).

    A pair is the mode of a batch of decodes only, and the mode of any other batch.
    """

    NONE = 0
    PIECEWISE = 1
    """Everything between the attention layers."""
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
    """The level of support of the layers that share one metadata builder.

    Args:
        support: level of the builder.
        backend: name of the backend.
        layer_names: the layers.
    """

    support: AttentionCGSupport
    backend: str
    layer_names: tuple[str, ...]


@dataclass(frozen=True)
class AttentionCGSupportInfo:
    """The weakest level among some backends, and the backend with it (vLLM's name).

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
