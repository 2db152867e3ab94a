"""Constants of the whole project: special values, dtypes, attention types."""

from enum import Enum
from typing import Any

import torch

PAD_SLOT_ID = -1
"""The slot of a token whose key and value are not stored (vLLM's name)."""

NULL_BLOCK_ID = 0
"""The block that fills the entries of a row whose blocks a sliding window has passed (vLLM's name).

No request holds it, and no token that is computed attends to it."""

HOST = torch.device("cpu")
"""The device on which a step is planned, independent of torch's default device."""

CACHE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of the optimized twin's caches; the reference also takes float64."""


class AttentionType(str, Enum):
    """Which tokens attend to which keys (vLLM's strings; each member equals its value)."""

    DECODER = "decoder"
    """A decoder's tokens attend to their own sequence, causally, with a cache."""
    ENCODER = "encoder"
    """The tokens of an encoder-decoder model's encoder, in both directions, not cached."""
    ENCODER_ONLY = "encoder_only"
    """The prompt of a model without a decoder, in both directions, not cached."""
    ENCODER_DECODER = "encoder_decoder"
    """Cross-attention: a decoder's tokens attend to the encoder's cached keys."""

    def __str__(self) -> str:
        return self.value


_NEW_PLACE = "pagetwin.contract.cache_formats."
_MOVED = {
    "CACHE_DTYPE_NAMES": _NEW_PLACE + "CACHE_DTYPE_NAMES",
    "FP8_DTYPES": _NEW_PLACE + "TENSOR_SCALE_DTYPES",
    "cache_dtype_of": _NEW_PLACE + "cache_dtype_of",
}
"""Names that were in this file, and where they are."""


def __getattr__(name: str) -> Any:
    """Raise ImportError for a name that has moved."""
    if name in _MOVED:
        raise ImportError(f"{__name__}.{name} is now {_MOVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
