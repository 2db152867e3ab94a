"""Which values does the whole project agree on?"""

from enum import Enum

import torch

PAD_SLOT_ID = -1
"""The slot of a token whose key and value are not stored (vLLM's name)."""

HOST = torch.device("cpu")
"""Where a step is planned, whatever torch's default device is."""

CACHE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""What the twin stores; the reference also takes float64."""


class AttentionType(str, Enum):
    """Whose tokens ask, and whose keys answer (vLLM's strings; each equals its value)."""

    DECODER = "decoder"
    """A decoder's tokens and their own sequence, cached; each sees what came before it."""
    ENCODER = "encoder"
    """The tokens of an encoder beside a decoder, all at once, both directions, not cached."""
    ENCODER_ONLY = "encoder_only"
    """The prompt of a model that has no decoder: both directions, not cached."""
    ENCODER_DECODER = "encoder_decoder"
    """Cross-attention: a decoder's tokens and the encoder's cached keys."""

    def __str__(self) -> str:
        return self.value
