"""Figures of bugs: the state of blocks, tables and slots, computed by the right and the wrong code.

A scene is a function that gets the operations of an implementation, makes some calls, and returns
the state as strips of cells. It is run on `pagetwin.reference`, and on the reference with the bug.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

KINDS = ("a", "b", "new", "off", "")
Scene = Callable[[Any], "list[Strip]"]


@dataclass(frozen=True)
class Strip:
    """One row of a figure.

    Args:
        name: What it shows. Strips of one scene have different names.
        cells: Texts.
        kinds: Per cell "a" or "b" (two requests), "new", "off" (unused), or "" (a number).
        captions: Per cell a smaller text below, or none for all. A number is the position of a
            token.
    """

    name: str
    cells: tuple[str, ...]
    kinds: tuple[str, ...]
    captions: tuple[str, ...] = ()


def strip(
    name: str,
    values: Sequence[Any],
    kind: str | Sequence[str] = "",
    captions: Sequence[Any] = (),
) -> Strip:
    """Return a strip.

    Args:
        name: What it shows.
        values: Texts or numbers.
        kind: One of the kinds of `Strip` for all cells, or one per cell: "aab", or a list.
        captions: Optional. A smaller text per cell.
    """
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    kinds = [str(kind)] * len(values) if kind in KINDS else list(kind)
    assert len(kinds) == len(values) and len(captions) in (0, len(values)), name
    return Strip(
        name,
        tuple(map(shown, values)),
        tuple(kinds),
        tuple(map(str, captions)),
    )


def named(blocks: Sequence[int]) -> list[str]:
    """Return block ids with the word, so that block 0 does not look like a count."""
    return [f"block {block}" for block in blocks]


def shown(value: Any) -> str:
    """Return a number with at most four digits, or a text as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def figures(scene: Scene, right: Any, wrong: Any) -> tuple[str, str]:
    """Return the figure of the wrong code, and that of what differs in the right code, as HTML.

    Args:
        scene: The calls. Its docstring is the caption.
        right, wrong: The operations without and with the bug.

    Raises:
        ValueError: Both give the same state.
    """
    found, expected = scene(wrong), scene(right)
    same = {strip for strip in found if strip in expected}
    others = {strip.name: strip for strip in found}
    changed = [strip for strip in expected if strip not in same]
    if not changed:
        raise ValueError(f"{scene.__name__}: the right and the wrong code do the same")
    caption = " ".join((inspect.getdoc(scene) or "").split())
    first = [_row(strip, is_wrong=strip not in same) for strip in found]
    second = [_row(strip, others.get(strip.name)) for strip in changed]
    words = "With the right line. Cells with a thick border differ."
    texts = [text for strip in (*found, *expected) for text in strip.cells]
    width = max(map(len, texts))
    legend = (
        " A small number below a cell is the position of its token."
        if any(text.isdigit() for strip in found for text in strip.captions)
        else ""
    )
    return (
        _figure(first, f"{caption}{legend}", "State computed by the wrong code", width),
        _figure(second, words, "State computed by the right code", width),
    )


def _figure(rows: Sequence[str], caption: str, label: str, width: int) -> str:
    """Return a figure whose cells have the width of so many characters."""
    return (
        f'<figure class="state" aria-label="{label}" style="--cell: {width}ch">{"".join(rows)}'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _row(strip: Strip, other: Strip | None = None, is_wrong: bool = False) -> str:
    """Return a strip as HTML; cells that differ from those of another one have a thick border."""
    name = f"{escape(strip.name)}{'<i>, with the bug</i>' if is_wrong else ''}"
    cells = []
    for index, (text, kind) in enumerate(zip(strip.cells, strip.kinds, strict=True)):
        classes = [kind] if kind else []
        if other is not None and other.cells[index : index + 1] != (text,):
            classes.append("differs")
        below = _caption(strip.captions[index]) if strip.captions else ""
        attribute = f' class="{" ".join(classes)}"' if classes else ""
        cells.append(f"<li{attribute}>{escape(text)}{below}</li>")
    if not cells:
        mark = " differs" * (other is not None and len(other.cells) > 0)
        cells = [f'<li class="off{mark}">none</li>']
    return f'<div class="strip"><span>{name}</span><ul>{"".join(cells)}</ul></div>'


def _caption(text: str) -> str:
    """Return the text below a cell; what is read aloud says what a number is."""
    unseen = ", position " if text.isdigit() else ", " if text else ""
    return f'<small><span class="unseen">{unseen}</span>{escape(text)}</small>'
