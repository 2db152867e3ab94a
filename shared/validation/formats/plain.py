"""Validation of the scales of a cache that is not quantized: it has none."""

from torch import Tensor


def validate(
    name: str, scale: Tensor | float | None, cache: Tensor, contents: bool
) -> None:
    """Raise if there is a scale."""
    if scale is not None:
        raise ValueError(
            f"{name} is given but the cache is {cache.dtype}: expected None, as only a"
            " quantized cache has scales"
        )
