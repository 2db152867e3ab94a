"""The picture of paged_attention: one request of two new tokens, with the numbers of each step."""

from typing import NamedTuple

import torch
from pagetwin.reference import paged_attention

from .drawing import Drawing

BLOCK_SIZE = 2
BLOCK_TABLE = (5, 1, 3)
NUM_BLOCKS = 6
QUERIES = (1.0, 2.0)
KEYS = (0.0, 1.0, 2.0, 1.0, 0.0)
VALUES = (10.0, 20.0, 30.0, 40.0, 50.0)


class Layout(NamedTuple):
    """Sizes of the figure: of the whole, and of its parts.

    Args:
        margin: Left edge of the labels.
        table: Left edge of the row of the block table.
        cache, slot, gap: Left edge of the cache, width of a slot, gap between two blocks.
        keys: Left edge of the rows with one entry per key.
        lead: Height of a label above what it names. 0: labels are left of it.
    """

    width: int
    height: int
    margin: int
    table: int
    cache: int
    slot: int
    gap: int
    keys: int
    lead: int


WIDE = Layout(760, 640, 20, 196, 108, 46, 14, 196, 0)
NARROW = Layout(356, 872, 8, 110, 4, 27, 5, 66, 26)
CELL = 46


def draw() -> Drawing:
    return _draw(WIDE)


def draw_narrow() -> Drawing:
    return _draw(NARROW)


def _draw(sizes: Layout) -> Drawing:
    d = Drawing(
        sizes.width,
        sizes.height,
        "Two new tokens of one sequence attend to its five keys. Heads have one element, so a key"
        " is one number, and the scale is 1. The numbers are computed by pagetwin.reference when"
        " this page is built.",
    )
    _table_and_cache(d, sizes)
    y = _gathered(d, sizes, 234)
    y = _scores(d, sizes, y + 20)
    _legend(d, sizes, y)
    return d


def attend() -> tuple[list[list[float]], list[list[float]], list[float]]:
    """Return scores, weights and outputs of both queries."""
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
        block, offset = BLOCK_TABLE[position // BLOCK_SIZE], position % BLOCK_SIZE
        key_cache[block, offset], value_cache[block, offset] = key, value
    out: list[float] = (
        paged_attention(
            torch.tensor(QUERIES)[:, None, None],
            key_cache,
            value_cache,
            torch.tensor([BLOCK_TABLE], dtype=torch.int32),
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
    d.text(sizes.margin, 50, "block table, the" if not sizes.lead else "block table")
    d.text(sizes.margin, 68, "request's row")
    d.row(sizes.table, 36, [(str(block), "a") for block in BLOCK_TABLE], w=44)
    d.captions(sizes.table, 28, ("0-1", "2-3", "4-5"), w=44)
    d.text(sizes.table + 3 * 44 + 14, 28, "positions", "note")
    below = 166 if not sizes.lead else 212
    d.text(sizes.margin, below, "KV cache")
    for block in range(NUM_BLOCKS):
        x = _block_x(sizes, block)
        d.text(x + sizes.slot, 140, f"block {block}", "caption")
        for offset in range(BLOCK_SIZE):
            left = x + offset * sizes.slot
            position = _position(block, offset)
            if position is None:
                d.box(left, 148, sizes.slot, 46, "", "off")
                continue
            d.box(left, 148, sizes.slot, 46, "", _kind(position))
            for y, text in (
                (167, f"k {KEYS[position]:g}"),
                (185, f"v {VALUES[position]:g}"),
            ):
                d.text(left + sizes.slot / 2, y, text, "caption")
    for entry, block in enumerate(BLOCK_TABLE):
        x = _block_x(sizes, block) + sizes.slot
        d.arrow(sizes.table + (entry + 0.5) * 44, 72, x, 126)


def _gathered(d: Drawing, sizes: Layout, y: float) -> float:
    """Draw the keys and values in sequence order. Returns: the place of what comes below."""
    y += sizes.lead
    _step(d, sizes, y - 2 - sizes.lead, 1, "gather")
    right = sizes.keys + len(KEYS) * CELL + 14
    if sizes.lead:
        _right_label(d, sizes, y - 2 - sizes.lead, "position in the sequence")
        y += 16
    else:
        d.text(right, y - 8, "position in the sequence", "note")
    d.captions(sizes.keys, y - 8 + sizes.lead / 8, range(len(KEYS)), w=CELL)
    for row, (name, numbers) in enumerate((("k", KEYS), ("v", VALUES))):
        top = y + row * 34
        d.text(sizes.keys - 22, top + 22, name, "label")
        cells = [(f"{number:g}", _kind(at)) for at, number in enumerate(numbers)]
        d.row(sizes.keys, top, cells, w=CELL, h=30)
    return y + 68


def _scores(d: Drawing, sizes: Layout, y: float) -> float:
    """Draw scores, mask, weights and outputs. Returns: the place of what comes below."""
    scores, weights, outputs = attend()
    middle, right = sizes.keys + 2.5 * CELL, sizes.keys + len(KEYS) * CELL + 14
    d.arrow(middle, y - 20, middle, y - 4)
    if sizes.lead:
        _step(d, sizes, y, 2, "scale * q @ k")
        d.text(sizes.margin + 150, y + 20, "3", "strong")
        d.text(sizes.margin + 164, y + 20, "mask", "label")
    else:
        _step(d, sizes, y, 2, "scale * q @ k")
        _step(d, sizes, y + 28, 3, "mask")
    y += sizes.lead
    for row, query in enumerate(QUERIES):
        top = y + row * 36
        d.text(sizes.keys - 50, top + 22, f"q = {query:g}", "label")
        cells = [
            ("-inf", "off") if score == float("-inf") else (f"{score:g}", _kind(at))
            for at, score in enumerate(scores[row])
        ]
        d.row(sizes.keys, top, cells, w=CELL, h=30)
        if not sizes.lead:
            d.text(right, top + 20, _whose(row), "note")
    d.arrow(middle, y + 72, middle, y + 100)
    y += 104
    _step(d, sizes, y, 4, "softmax")
    if sizes.lead:
        _right_label(d, sizes, y, "the sum of a row is 1")
    y += sizes.lead
    for row in range(len(QUERIES)):
        top = y + row * 36
        cells = [
            (f"{weight:.2f}", "off" if not weight else _kind(at))
            for at, weight in enumerate(weights[row])
        ]
        d.row(sizes.keys, top, cells, w=CELL, h=30)
        if not sizes.lead:
            d.text(right, top + 20, "sum 1", "note")
    d.arrow(middle, y + 72, middle, y + 100)
    y += 104
    _step(d, sizes, y, 5, "weights @ v")
    y += sizes.lead
    pitch = 36 if not sizes.lead else 66
    for row in range(len(QUERIES)):
        top = y + row * pitch
        d.box(sizes.keys, top, 2 * CELL, 30, f"{outputs[row]:.2f}", "new")
        products = [
            f"{weight:.3f} * {value:g}"
            for weight, value in zip(weights[row], VALUES, strict=True)
            if weight
        ]
        left = sizes.keys + 2 * CELL + 14
        if not sizes.lead:
            d.text(left, top + 20, f"= {' + '.join(products)}", "note")
            continue
        d.text(left, top + 12, f"= {' + '.join(products[:2])}", "note")
        for line in range(2, len(products), 2):
            words = " + ".join(products[line : line + 2])
            d.text(left, top + 12 + 9 * line, f"+ {words}", "note")
    return y + 2 * pitch + 10


def _legend(d: Drawing, sizes: Layout, y: float) -> None:
    """Draw what the colours mean."""
    for number, (x, kind, words) in enumerate(
        (
            (20, "a", "cached before this step"),
            (210, "new", "new in this step"),
            (370, "off", "masked, or a slot that the request does not use"),
        )
    ):
        left, top = (x, y) if not sizes.lead else (sizes.margin, y + 24 * number)
        d.box(left, top, 18, 18, "", kind)
        d.text(left + 26, top + 14, words, "note")


def _step(d: Drawing, sizes: Layout, y: float, number: int, words: str) -> None:
    d.text(sizes.margin + 6, y + 20, f"{number}", "strong")
    d.text(sizes.margin + 18, y + 20, words, "label")


def _right_label(d: Drawing, sizes: Layout, y: float, words: str) -> None:
    d.text(sizes.margin + 110, y + 20, words, "note")


def _whose(row: int) -> str:
    return f"the token at position {len(KEYS) - len(QUERIES) + row}"


def _kind(position: int) -> str:
    return "new" if position >= len(KEYS) - len(QUERIES) else "a"


def _block_x(sizes: Layout, block: int) -> float:
    return sizes.cache + block * (2 * sizes.slot + sizes.gap)


def _position(block: int, offset: int) -> int | None:
    """Return the position whose key is in a slot; None if the slot is not used."""
    if block not in BLOCK_TABLE:
        return None
    position = BLOCK_TABLE.index(block) * BLOCK_SIZE + offset
    return position if position < len(KEYS) else None
