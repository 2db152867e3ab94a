"""Validation of the scales of an FP8 cache: one number, or one per kv head."""

from torch import Tensor

from ...contract.cache_formats import FORMATS
from ..scales import check_scale


def validate(
    name: str, scale: Tensor | float | None, cache: Tensor, contents: bool
) -> None:
    """Raise if the scale is missing, or is not a finite number above 0 for all or for each head."""
    if scale is None:
        measured = "".join(
            f"; {form.scales[0].value} {str(form.scale_dtype).removeprefix('torch.')} scales"
            f" are for {form.name}"
            for form in FORMATS.values()
            if form.dtype == cache.dtype and form.is_measured
        )
        raise ValueError(
            f"{name} = None: expected a scale, as the cache is {cache.dtype}{measured}; 1.0 takes"
            " its numbers as they are"
        )
    check_scale(name, scale, {"key_cache": cache}, cache.shape[2], contents)
