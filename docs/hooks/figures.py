"""How do the pictures of the documentation come about?

Each concept's picture is drawn here as SVG and set into its page, so that its colours follow the
page's light or dark scheme (docs/css/pagetwin.css). The numbers are those of the worked examples.
"""

from collections.abc import Callable, Sequence
from html import escape

Cell = tuple[str, str]
"""What stands in a box, and its class: a, b (two requests), new, off (nobody's)."""


class Drawing:
    """SVG elements, and the room they take."""

    def __init__(self, width: int, height: int, says: str) -> None:
        self.width, self.height, self.says = width, height, says
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

    def svg(self) -> str:
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
            ' markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>'
        )
        return (
            f'<figure class="drawing"><svg viewBox="0 0 {self.width} {self.height}"'
            f' style="max-width:{self.width}px" role="img"'
            f' aria-label="{escape(self.says, quote=True)}">{tip}{"".join(self.parts)}'
            f"</svg><figcaption>{escape(self.says)}</figcaption></figure>"
        )


def index() -> Drawing:
    d = Drawing(
        760,
        262,
        "Two packages with the same files, names and signatures. Both obey what is shared;"
        " tests hold them equal.",
    )
    for x, name, kind, lines in (
        (20, "reference", "a", ("plain torch, loops welcome", "to be read")),
        (520, "optimized", "b", ("numpy, Triton, xFormers", "to be fast")),
    ):
        d.box(x, 20, 220, 100, "", kind)
        d.text(x + 110, 52, f"pagetwin.{name}", "strong")
        for number, line in enumerate(lines):
            d.text(x + 110, 80 + 22 * number, line, "cell")
    d.text(380, 48, "the same answers:", "cell")
    d.text(380, 70, "integers and bytes exactly,", "caption")
    d.text(380, 88, "sums within a budget a row", "caption")
    d.arrow(310, 104, 246, 104)
    d.arrow(450, 104, 514, 104)
    d.box(150, 190, 460, 56, "", "new")
    d.text(380, 213, "pagetwin.shared", "strong")
    d.text(380, 235, "shapes, refusals, budgets, examples, replay", "cell")
    d.arrow(130, 124, 240, 186)
    d.arrow(630, 124, 520, 186)
    d.text(134, 166, "imports", "caption")
    d.text(626, 166, "imports", "caption")
    return d


def block_table() -> Drawing:
    d = Drawing(
        720,
        232,
        "Request 0 owns blocks 7 and 2, request 1 owns block 5. What stands behind a row's"
        " end is never read.",
    )
    d.text(20, 58, "block table")
    d.text(130, 24, "request 0: 8 tokens")
    d.row(130, 36, [("7", "a"), ("2", "a"), ("0", "off")])
    d.text(400, 24, "request 1: 4 tokens")
    d.row(400, 36, [("5", "b"), ("0", "off"), ("0", "off")])
    owners = {7: ("0-3", "a"), 2: ("4-7", "a"), 5: ("0-3", "b")}
    d.row(130, 160, [owners.get(n, ("", "off")) for n in range(8)], w=72, h=38)
    d.captions(130, 220, [f"block {n}" for n in range(8)], w=72)
    d.text(20, 184, "the cache,")
    d.text(20, 202, "with positions", "note")
    d.arrow(152, 74, 130 + 7.5 * 72, 156)
    d.arrow(196, 74, 130 + 2.5 * 72, 156)
    d.arrow(422, 74, 130 + 5.5 * 72, 156)
    return d


def slot_mapping() -> Drawing:
    d = Drawing(
        720,
        282,
        "Position 5 is entry 5 // 4 = 1 of the row: block 2. It is number 5 % 4 = 1 there:"
        " slot 2 * 4 + 1 = 9.",
    )
    d.text(20, 43, "positions")
    d.row(110, 20, [(str(n), "new" if n == 5 else "a") for n in range(10)])
    d.text(20, 123, "row")
    for entry, block in enumerate((7, 2, 5)):
        d.box(110 + entry * 176, 100, 176, 34, f"entry {entry}: block {block}", "a")
    d.text(20, 233, "slots")
    # the shelf in its own order: block 2, then 5, then 7
    for place, (block, first) in enumerate(((2, 4), (5, 8), (7, 0))):
        x = 110 + place * 200
        cells = []
        for offset in range(4):
            position = first + offset
            kind = "new" if position == 5 else "a" if position < 10 else "off"
            cells.append((str(block * 4 + offset), kind))
        d.row(x, 210, cells)
        d.text(x + 88, 266, f"block {block}", "caption")
    d.arrow(110 + 5.5 * 44, 58, 110 + 5.5 * 44, 96)
    d.arrow(110 + 5.5 * 44, 138, 110 + 1.5 * 44, 206)
    d.text(372, 82, "5 // 4 = 1: which entry", "note")
    d.text(372, 182, "5 % 4 = 1: how far into its block", "note")
    return d


def kv_cache() -> Drawing:
    d = Drawing(
        720,
        296,
        "One layer's cache of ten blocks: raw bytes, two halves, blocks, slots.",
    )
    d.text(20, 42, "bytes")
    d.box(110, 20, 600, 34, "327,680 bytes (int8), taken once", "off")
    d.text(20, 102, "halves")
    d.row(110, 80, [("keys", "a"), ("values", "b")], w=300)
    d.text(20, 162, "blocks")
    d.row(110, 140, [(str(n), "a") for n in range(10)], w=30)
    d.row(410, 140, [(str(n), "b") for n in range(10)], w=30)
    d.text(20, 222, "slots")
    d.row(110, 200, [(str(n), "new") for n in range(16)], w=37.5)
    d.arrow(110 + 6.5 * 30, 176, 110 + 6.5 * 30, 197)
    d.text(330, 192, "one block: 16 slots", "note")
    d.text(20, 277, "elements")
    d.row(110, 255, [(f"head {n}: 64", "new") for n in range(8)], w=75)
    d.arrow(110 + 4.5 * 37.5, 236, 110 + 4.5 * 37.5, 252)
    d.text(330, 249, "one slot: one token's key, 8 heads", "note")
    return d


def cache_ops() -> Drawing:
    d = Drawing(
        700,
        292,
        "A write scatters tokens to their slots (token 1 has none). A gather follows the"
        " block table and brings a sequence back in order.",
    )
    d.text(20, 43, "new tokens")
    d.row(110, 20, [("5", "new"), ("6", "off")])
    d.captions(110, 72, ["slot 9", "slot -1"])
    for block in range(3):
        x = 110 + block * 196
        cells = []
        for offset in range(4):
            slot = block * 4 + offset
            kind = "new" if slot == 9 else "a" if slot in (0, 1, 8, 10, 11) else "off"
            cells.append((str(slot), kind))
        d.row(x, 120, cells)
        d.text(x + 88, 176, f"block {block}", "caption")
    d.text(20, 143, "cache")
    d.arrow(132, 78, 110 + 2 * 196 + 66, 116)
    d.text(20, 269, "gathered")
    d.row(330, 246, [(str(s), "new" if s == 9 else "a") for s in (8, 9, 10, 11, 0, 1)])
    d.text(110, 269, "through the row 2, 0", "note")
    d.arrow(110 + 2 * 196 + 88, 184, 418, 242)
    d.arrow(198, 184, 550, 242)
    return d


def batch_split() -> Drawing:
    d = Drawing(
        700,
        212,
        "New tokens of four requests, as they came and after one swap. The boundary cuts"
        " the batch into two plain slices.",
    )
    counts = [6, 1, 7, 1]
    for y, order, name in (
        (30, [0, 1, 2, 3], "as they came"),
        (130, [3, 1, 2, 0], "in order"),
    ):
        d.text(20, y + 23, name)
        x = 130
        for request in order:
            width = 34 * counts[request]
            kind = "new" if counts[request] == 1 else "b"
            d.box(x, y, width, 36, str(counts[request]), kind)
            d.text(x + width / 2, y + 53, f"r{request}", "caption")
            x += width
    d.arrow(130 + 3 * 34, 88, 130 + 12 * 34, 126)
    d.arrow(130 + 14.5 * 34, 88, 147, 126)
    x = 130 + 2 * 34
    d.parts.append(f'<path d="M{x} 118 L{x} 200" class="cut"/>')
    d.text(x - 6, 206, "2 decodes, 2 tokens", "end")
    d.text(x + 6, 206, "2 prefills, 13 tokens", "label")
    return d


def metadata() -> Drawing:
    d = Drawing(
        700,
        262,
        "One flat batch: one token of request 0, three of request 1.",
    )
    d.text(20, 43, "new tokens")
    x, w = 170, 70
    d.row(x, 20, [("r0", "a"), ("r1", "b"), ("r1", "b"), ("r1", "b")], w=w)
    d.text(20, 88, "position")
    d.captions(x, 88, [4, 0, 1, 2], w=w)
    d.text(20, 114, "slot_mapping")
    d.captions(x, 114, [8, 20, 21, 22], w=w)
    d.text(20, 140, "query_start_loc")
    for start in (0, 1, 4):
        left = x + start * w
        d.parts.append(f'<path d="M{left} 58 L{left} 124" class="cut"/>')
        d.text(left, 140, str(start), "caption")
    d.text(20, 186, "seq_lens")
    d.row(x, 164, [("5", "a"), ("3", "b")])
    d.text(x + 110, 186, "4 in the cache + 1 new; 0 + 3 new", "note")
    d.text(20, 236, "block table")
    d.row(x, 214, [("7", "a"), ("2", "a")])
    d.row(x + 110, 214, [("5", "b"), ("0", "off")])
    d.text(x + 216, 236, "one row a request", "note")
    return d


def paged_attention() -> Drawing:
    d = Drawing(
        720,
        272,
        "Who sees what: rows are new tokens, columns the keys of their sequence. The new"
        " tokens are always the last ones.",
    )
    panels = (
        (20, "prefill: 4 new of 4", 4, 4),
        (260, "chunk: 2 new of 6", 2, 6),
        (540, "decode: 1 new of 5", 1, 5),
    )
    size = 30
    for x, title, queries, keys in panels:
        d.text(x, 28, title)
        d.captions(x, 58, range(keys), w=size)
        for query in range(queries):
            position = keys - queries + query
            cells = [("", "a" if key <= position else "off") for key in range(keys)]
            cells[position] = ("", "new")
            d.row(x, 68 + query * size, cells, w=size, h=size)
    d.box(20, 218, 22, 22, "", "a")
    d.text(50, 234, "seen, from the cache", "note")
    d.box(220, 218, 22, 22, "", "new")
    d.text(250, 234, "seen, the token itself", "note")
    d.box(430, 218, 22, 22, "", "off")
    d.text(460, 234, "hidden: it comes later", "note")
    return d


def backend() -> Drawing:
    d = Drawing(
        760,
        222,
        "Once a step: metadata. Once a layer: write, then attend for both parts of the"
        " batch.",
    )
    d.text(20, 28, "once a step")
    d.box(20, 40, 200, 44, "requests of the step", "off")
    d.box(270, 40, 210, 44, "common metadata", "a")
    d.box(530, 40, 210, 44, "backend's metadata", "a")
    d.arrow(222, 62, 266, 62)
    d.arrow(482, 62, 526, 62)
    d.text(375, 102, "build_common_attn_metadata", "caption")
    d.text(635, 102, "builder.build", "caption")
    d.text(20, 140, "once a layer: impl.forward")
    d.box(20, 152, 200, 44, "write keys and values", "new")
    d.box(270, 152, 210, 44, "attend: the decodes", "b")
    d.box(530, 152, 210, 44, "attend: the prefills", "b")
    d.arrow(222, 174, 266, 174)
    d.arrow(482, 174, 526, 174)
    return d


FIGURES: dict[str, Callable[[], Drawing]] = {
    each.__name__: each
    for each in (
        index,
        block_table,
        slot_mapping,
        kv_cache,
        cache_ops,
        batch_split,
        metadata,
        paged_attention,
        backend,
    )
}


def figure(name: str) -> str:
    """Return the picture of that name as HTML for a page."""
    return FIGURES[name]().svg()
