"""Validation of the cache format that a model of another library is to have."""

from typing import Any

from ..contract.cache_formats import FORMATS, CacheFormat
from ..contract.layer_pages import is_layer_format


def read_cache_format(name: Any) -> CacheFormat:
    """Return the format with that name.

    Raises:
        TypeError: the name is not text.
        ValueError: no format has that name, or its scales are neither measured nor one number.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"cache_format = {name!r} is {type(name).__name__}: expected the name of a format,"
            f" one of {_names()}"
        )
    for form in FORMATS.values():
        if name in (form.name, *form.aliases) and is_layer_format(form):
            return form
    raise ValueError(f"cache_format = {name!r}: expected one of {_names()}")


def check_format_heads(form: CacheFormat, layer: str, *head_sizes: int) -> None:
    """Raise ValueError if keys or values of these sizes do not fill a format's bytes or blocks.

    Args:
        form: the format.
        layer: what the keys belong to, in words.
        head_sizes: elements of a key, and of a value.
    """
    for size in head_sizes:
        if size % form.head_size_step:
            raise ValueError(
                f"cache_format = {form.name!r} and heads of {size} elements in {layer}: expected a"
                f" multiple of {form.head_size_step}, or one of {_names(*head_sizes)}"
            )


def _names(*head_sizes: int) -> str:
    """Return the names of the formats that heads of these sizes can have."""
    forms = [
        form
        for form in FORMATS.values()
        if is_layer_format(form)
        and not any(size % form.head_size_step for size in head_sizes)
    ]
    aliases = [alias for form in forms for alias in form.aliases]
    return ", ".join([*(form.name for form in forms), *aliases])
