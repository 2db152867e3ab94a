"""Drawings of blocks and slots for the terminal."""

from collections.abc import Sequence

from rich.text import Text

Cell = tuple[str, str]
"""The text of a box and its style."""

A, B, NEW, DIM, PLAIN = "cyan", "magenta", "bold green", "dim", ""


def boxes(cells: Sequence[Cell], width: int = 4) -> list[Text]:
    """Return cells drawn as boxes side by side: three lines."""
    top = "┌" + "┬".join("─" * width for _ in cells) + "┐"
    bottom = "└" + "┴".join("─" * width for _ in cells) + "┘"
    middle = Text().append("│", style=DIM)
    for text, style in cells:
        middle.append(text.center(width), style=style or "default")
        middle.append("│", style=DIM)
    return [Text(top, style=DIM), middle, Text(bottom, style=DIM)]


def under(cells: Sequence[str], width: int = 4) -> Text:
    """Return captions for the line under (or over) such boxes."""
    words = " ".join(text.center(width) for text in cells)
    return Text(f" {words} ", style=DIM)


def beside(*columns: Sequence[Text], gap: int = 2) -> list[Text]:
    """Return drawings of equal height side by side."""
    lines = []
    for row in zip(*columns, strict=True):
        line = Text()
        for number, (text, column) in enumerate(zip(row, columns, strict=True)):
            width = max(len(cell.plain) for cell in column)
            line.append_text(text)
            last = number == len(columns) - 1
            line.append(" " * (width - len(text.plain) + (0 if last else gap)))
        lines.append(line)
    return lines


def said(*lines: str) -> list[Text]:
    return [Text(line, style=PLAIN) for line in lines]
