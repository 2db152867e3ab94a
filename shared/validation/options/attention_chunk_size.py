"""Validation and generator of `attention_chunk_size`: positions per chunk."""

from ..option import Drawing, Option, OptionCall
from ..primitives import check_positive


def validate(attention_chunk_size: int, call: OptionCall) -> None:
    """Raise if the size is not positive."""
    check_positive(attention_chunk_size=attention_chunk_size)


def draw(name: str, drawing: Drawing) -> int:
    """Return the size: one that divides tiles, or one that does not."""
    return int(name)


OPTION = Option(
    name="attention_chunk_size",
    meaning="positions per chunk; a query attends to its own chunk",
    default="no chunks",
    heading="chunks",
    values=("none", "8", "33"),
    draw=draw,
    validate=validate,
)
