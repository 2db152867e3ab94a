"""Constants and kinds that the whole project shares."""

from enum import Enum

import torch

PAD_SLOT_ID = -1
"""The slot of a token whose key and value are not stored (vLLM's name)."""

HOST = torch.device("cpu")
"""The device on which a step is planned, whatever torch's default device is."""

CACHE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Element types of the optimized twin's caches; the reference also takes float64."""

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Element types of a quantised cache, whose elements are multiplied by a scale."""


class AttentionType(str, Enum):
    """The tokens that attend, and the keys that they attend to (vLLM's strings)."""

    DECODER = "decoder"
    """A decoder's tokens and their own sequence, cached; causal."""
    ENCODER = "encoder"
    """The tokens of an encoder beside a decoder, all at once, both directions, not cached."""
    ENCODER_ONLY = "encoder_only"
    """The prompt of a model that has no decoder: both directions, not cached."""
    ENCODER_DECODER = "encoder_decoder"
    """Cross-attention: a decoder's tokens and the encoder's cached keys."""

    def __str__(self) -> str:
        return self.value


CACHE_DTYPE_NAMES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""vLLM's names of quantised caches."""


def cache_dtype_of(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """Return the element type of a cache by vLLM's name.

    Args:
        name: "auto" for the model's own, "fp8", "fp8_e4m3" or "fp8_e5m2".
        model_dtype: of the keys and values.

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
