"""The picture of paged_attention: request b of the step of `one_step`, with all its numbers."""

from typing import NamedTuple

import torch
from pagetwin.reference import paged_attention

from .drawing import Drawing
from .one_step import BLOCK_SIZE, CONTEXT, KINDS, NEW, NUM_BLOCKS, TABLE

REQUEST = KINDS.index("b")
ROW = TABLE[REQUEST]
QUERIES = (1.0, 2.0, 1.0)
KEYS = (0.0, 1.0, 2.0, 1.0, 0.0)
VALUES = (10.0, 20.0, 30.0, 40.0, 50.0)


class Layout(NamedTuple):
    """Sizes of the figure: of the whole, and of its parts.

    Args:
        table: Left edge of the row of the block table.
        slot: Width of a slot of the request.
        other: Width of a slot of any other block.
        gap: Gap between two blocks.
        keys, cell: Left edge of the rows with one entry per key, and width of an entry.
        lead: Height of a label above what it names. 0: labels are left of it.
    """

    width: int
    height: int
    margin: int
    table: int
    slot: int
    other: int
    gap: int
    keys: int
    cell: int
    lead: int


WIDE = Layout(760, 764, 12, 180, 44, 20, 8, 180, 52, 0)
NARROW = Layout(340, 856, 6, 132, 26, 5, 6, 70, 52, 28)
PITCH = 36


def draw() -> Drawing:
    return _draw(WIDE)


def draw_narrow() -> Drawing:
    return _draw(NARROW)


def _draw(sizes: Layout) -> Drawing:
    results = ", ".join(f"{output:.2f}" for output in attend()[2])
    d = Drawing(
        sizes.width,
        sizes.height,
        "The three new tokens of request b attend to its keys. Heads have one element, so a key is"
        " one number, and the scale is 1. Weights are shown with two digits; outputs are computed"
        " from the exact weights, by pagetwin.reference when this page is built. A bold outline:"
        " new in this step.",
        f"Request b has the row {list(ROW)} of the block table. Its five keys and values are"
        " gathered from these two blocks, in the order of its tokens. Each of three queries gets a"
        " score per key, later keys are masked, softmax turns the scores into weights, and the"
        f" weights average the values to the outputs {results}.",
    )
    _table_and_cache(d, sizes)
    y = _gathered(d, sizes, 230)
    y = _scores(d, sizes, y)
    _weights(d, sizes, y)
    return d


def attend() -> tuple[list[list[float]], list[list[float]], list[float]]:
    """Return masked scores, weights and outputs of all queries."""
    scores = torch.tensor(QUERIES)[:, None] * torch.tensor(KEYS)
    first = len(KEYS) - len(QUERIES)
    hidden = torch.arange(len(KEYS)) > torch.arange(first, len(KEYS))[:, None]
    masked = scores.masked_fill(hidden, -torch.inf)
    return masked.tolist(), masked.softmax(1).tolist(), _outputs()


def _outputs() -> list[float]:
    """Return what the reference computes from a cache with poison in all other slots."""
    key_cache = torch.full((NUM_BLOCKS, BLOCK_SIZE, 1, 1), torch.nan)
    value_cache = key_cache.clone()
    for position, (key, value) in enumerate(zip(KEYS, VALUES, strict=True)):
        block, offset = ROW[position // BLOCK_SIZE], position % BLOCK_SIZE
        key_cache[block, offset], value_cache[block, offset] = key, value
    out: list[float] = (
        paged_attention(
            torch.tensor(QUERIES)[:, None, None],
            key_cache,
            value_cache,
            torch.tensor([ROW], dtype=torch.int32),
            torch.tensor([0, len(QUERIES)], dtype=torch.int32),
            torch.tensor([len(KEYS)], dtype=torch.int32),
            len(QUERIES),
            len(KEYS),
        )
        .flatten()
        .tolist()
    )
    return out


def _table_and_cache(d: Drawing, sizes: Layout) -> None:
    """Draw the request's row of the block table, and the blocks that it names."""
    d.text(sizes.margin, 43, "block_table,", "head")
    d.text(sizes.margin, 61, "row of b", "head")
    d.row(sizes.table, 32, [(str(block), "b") for block in ROW], w=56)
    spans = [
        f"{entry * BLOCK_SIZE}-{(entry + 1) * BLOCK_SIZE - 1}"
        for entry in range(len(ROW))
    ]
    d.captions(sizes.table, 24, spans, w=56)
    d.text(sizes.table + len(ROW) * 56 + 12, 24, "positions", "note")
    d.text(sizes.margin, 112, "KV cache", "head")
    x: float = sizes.margin
    for block in range(NUM_BLOCKS):
        width = sizes.slot if block in ROW else sizes.other
        named = width > 20 or not sizes.lead
        if named:
            d.text(x + 2 * width, 138, f"block {block}", "caption")
        for offset in range(BLOCK_SIZE):
            left, position = x + offset * width, _position(block, offset)
            if position is None:
                other = block in TABLE[1 - REQUEST]
                used = other and (
                    TABLE[1 - REQUEST].index(block) * BLOCK_SIZE + offset
                    < CONTEXT[1 - REQUEST] + NEW[1 - REQUEST]
                )
                d.box(left, 146, width, 46, "", KINDS[1 - REQUEST] if used else "off")
                continue
            d.box(left, 146, width, 46, "", _kind(position))
            for y, number in ((165, KEYS[position]), (184, VALUES[position])):
                d.text(left + width / 2, y, f"{number:g}", "cell")
        if block in ROW:
            start = sizes.table + (ROW.index(block) + 0.5) * 56
            d.arrow(start, 68, x + 2 * width, 124)
        x += BLOCK_SIZE * width + sizes.gap
    words = "in a slot: the key above the value; other blocks are not read"
    d.text(sizes.margin, 211, words if not sizes.lead else words[:34], "note")


def _gathered(d: Drawing, sizes: Layout, y: float) -> float:
    """Draw the keys and values in sequence order. Returns: the place of what comes below."""
    right = sizes.keys + len(KEYS) * sizes.cell + 14
    y += 14 + (sizes.lead and sizes.lead + 12)
    if sizes.lead:
        _step(d, sizes, y - 48, 1, "gather, by position")
    else:
        _step(d, sizes, y, 1, "gather")
        d.text(right, y - 6, "position in the sequence", "note")
    d.captions(sizes.keys, y - 6, range(len(KEYS)), w=sizes.cell)
    for row, (name, numbers) in enumerate((("k", KEYS), ("v", VALUES))):
        top = y + row * PITCH
        d.text(sizes.keys - 14, top + 21, name, "end")
        cells = [(f"{number:g}", _kind(at)) for at, number in enumerate(numbers)]
        d.row(sizes.keys, top, cells, w=sizes.cell, h=30)
    return _arrow_down(d, sizes, y + 2 * PITCH)


def _scores(d: Drawing, sizes: Layout, y: float) -> float:
    """Draw the masked scores. Returns: the place of what comes below."""
    scores, _, _ = attend()
    right = sizes.keys + len(KEYS) * sizes.cell + 14
    _step(d, sizes, y, 2, "scores, q * k")
    if sizes.lead:
        d.text(sizes.margin + 130, y + 20, "3", "strong")
        d.text(sizes.margin + 142, y + 20, "mask", "head")
    else:
        _step(d, sizes, y + PITCH, 3, "mask")
    y += sizes.lead
    for row, query in enumerate(QUERIES):
        top = y + row * PITCH
        d.text(sizes.keys - 14, top + 21, f"q = {query:g}", "end")
        cells = [
            ("-inf", "off") if score == float("-inf") else (f"{score:g}", _kind(at))
            for at, score in enumerate(scores[row])
        ]
        d.row(sizes.keys, top, cells, w=sizes.cell, h=30)
        if not sizes.lead:
            words = f"the token at position {len(KEYS) - len(QUERIES) + row}"
            d.text(right, top + 20, words, "note")
    return _arrow_down(d, sizes, y + len(QUERIES) * PITCH)


def _weights(d: Drawing, sizes: Layout, y: float) -> None:
    """Draw weights and outputs."""
    _, weights, outputs = attend()
    right = sizes.keys + len(KEYS) * sizes.cell + 14
    _step(d, sizes, y, 4, "softmax")
    if sizes.lead:
        d.text(sizes.margin + 110, y + 20, "the sum of a row is 1", "note")
    y += sizes.lead
    for row in range(len(QUERIES)):
        top = y + row * PITCH
        cells = [
            (f"{weight:.2f}", "off" if not weight else _kind(at))
            for at, weight in enumerate(weights[row])
        ]
        d.row(sizes.keys, top, cells, w=sizes.cell, h=30)
        if not sizes.lead:
            d.text(right, top + 20, "sum 1", "note")
    y = _arrow_down(d, sizes, y + len(QUERIES) * PITCH)
    _step(d, sizes, y, 5, "weights * v, summed")
    y += 28
    for row, output in enumerate(outputs):
        top = y + row * PITCH
        d.box(sizes.keys, top, 2 * sizes.cell, 30, f"{output:.2f}", "b mark")
        left = sizes.keys + 2 * sizes.cell + 14
        products = [
            f"{weight:.2f} * {value:g}"
            for weight, value in zip(weights[row], VALUES, strict=True)
            if weight
        ]
        words = f"= {' + '.join(products)}"
        if sizes.lead:
            words = f"output of position {len(KEYS) - len(QUERIES) + row}"
        d.text(left, top + 20, words, "note")


def _arrow_down(d: Drawing, sizes: Layout, y: float) -> float:
    """Draw an arrow from one step to the next. Returns: the place of the next step."""
    middle = sizes.keys + len(KEYS) / 2 * sizes.cell
    d.arrow(middle, y - 2, middle, y + 20)
    return y + 26


def _step(d: Drawing, sizes: Layout, y: float, number: int, words: str) -> None:
    d.text(sizes.margin + 5, y + 20, f"{number}", "strong")
    d.text(sizes.margin + 18, y + 20, words, "head")


def _kind(position: int) -> str:
    return "b mark" if position >= len(KEYS) - len(QUERIES) else "b"


def _position(block: int, offset: int) -> int | None:
    """Return the position whose key is in a slot; None if the slot is not used."""
    if block not in ROW:
        return None
    position = ROW.index(block) * BLOCK_SIZE + offset
    return position if position < len(KEYS) else None
