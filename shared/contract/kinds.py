"""Constants of the whole project: special values, dtypes, attention types."""

from enum import Enum

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

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of a quantized cache, whose numbers are multiplied by a scale."""


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


CACHE_DTYPE_NAMES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""vLLM's names of quantized caches."""


def cache_dtype_of(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a cache by vLLM's name.

    Args:
        name: "auto" for the model's dtype, "fp8", "fp8_e4m3" or "fp8_e5m2".
        model_dtype: dtype of the keys and values.

    Raises:
        ValueError: another name.
    """
    if name == "auto":
        return model_dtype
    if name not in CACHE_DTYPE_NAMES:
        raise ValueError(
            f"kv_cache_dtype = {name!r}: expected auto, {', '.join(CACHE_DTYPE_NAMES)}"
        )
    return CACHE_DTYPE_NAMES[name]
