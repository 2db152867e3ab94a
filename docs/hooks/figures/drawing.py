"""Drawing: an SVG figure built from boxes, text and arrows."""

import zlib
from collections.abc import Sequence
from html import escape

Cell = tuple[str, str]
"""Text of a box, and its classes.

a, b: two requests, by colour. new: a third colour. off: unused or masked. used: memory that holds
tokens, of any request. mark: a bold outline in addition, for what is written in this step.
"""


class Drawing:
    """SVG elements of one figure, and its size.

    Args:
        width, height: Size in pixels. Letters are 14 pixels high, so a figure for a screen of 390
            pixels is 340 wide.
        caption: Sentences below the figure.
        alt: What the figure shows, for those who cannot see it. Empty: the caption.
    """

    def __init__(self, width: int, height: int, caption: str, alt: str = "") -> None:
        self.width, self.height, self.caption = width, height, caption
        self.alt = alt or caption
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "label") -> None:
        self.parts.append(
            f'<text x="{x}" y="{y}" class="{kind}">{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, w: float, h: float, words: str = "", kind: str = ""
    ) -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="3" class="{kind}"/>'
        )
        if words:
            self.text(x + w / 2, y + h / 2 + 5, words, "cell")

    def row(
        self, x: float, y: float, cells: Sequence[Cell], w: float = 44, h: float = 34
    ) -> None:
        for number, (words, kind) in enumerate(cells):
            self.box(x + number * w, y, w, h, words, kind)

    def captions(
        self, x: float, y: float, words: Sequence[object], w: float = 44
    ) -> None:
        for number, word in enumerate(words):
            self.text(x + (number + 0.5) * w, y, str(word), "caption")

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        middle = (y1 + y2) / 2
        path = (
            f"M{x1} {y1} C{x1} {middle} {x2} {middle} {x2} {y2}"
            if x1 != x2 and y1 != y2
            else f"M{x1} {y1} L{x2} {y2}"
        )
        self.parts.append(f'<path d="{path}" class="arrow" marker-end="url(#tip)"/>')

    def side_arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw an arrow that leaves and arrives horizontally."""
        middle = (x1 + x2) / 2
        path = f"M{x1} {y1} C{middle} {y1} {middle} {y2} {x2} {y2}"
        self.parts.append(f'<path d="{path}" class="arrow" marker-end="url(#tip)"/>')

    def svg(self, screen: str = "") -> str:
        """Return the figure as HTML.

        Args:
            screen: wide or narrow: the only screens that show it. Empty for all screens.
        """
        # ids are unique on a page, and a page may have two figures
        name = f"tip-{zlib.crc32(f'{self.width} {self.caption}'.encode()):x}"
        tip = (
            f'<defs><marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
            ' markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>'
        )
        parts = "".join(self.parts).replace("url(#tip)", f"url(#{name})")
        return (
            f'<figure class="{f"drawing {screen}".strip()}" tabindex="0">'
            f'<svg viewBox="0 0 {self.width} {self.height}"'
            f' style="max-width:{self.width}px" role="img"'
            f' aria-label="{escape(self.alt, quote=True)}">{tip}{parts}'
            f"</svg><figcaption>{escape(self.caption)}</figcaption></figure>"
        )
