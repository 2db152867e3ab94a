"""The picture of paged_attention: one request of two new tokens, with the numbers of each step."""

import torch
from pagetwin.reference import paged_attention

from .drawing import Drawing

BLOCK_SIZE = 2
BLOCK_TABLE = (5, 1, 3)
NUM_BLOCKS = 6
QUERIES = (1.0, 2.0)
KEYS = (0.0, 1.0, 2.0, 1.0, 0.0)
VALUES = (10.0, 20.0, 30.0, 40.0, 50.0)
CELL = 46
TABLE_X, CACHE_X, GATHERED_X = 196, 108, 196
"""Left edges of the block-table row, of the cache, and of the gathered keys."""


def draw() -> Drawing:
    d = Drawing(
        760,
        640,
        "Two new tokens of one sequence attend to its five keys. Heads have one element, so a key"
        " is one number, and the scale is 1. The numbers are computed by pagetwin.reference when"
        " this page is built.",
    )
    _table_and_cache(d)
    _gathered(d)
    _scores(d)
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


def _table_and_cache(d: Drawing) -> None:
    """Draw the request's row of the block table, and the blocks that it names."""
    d.text(20, 50, "block table, the", "label")
    d.text(20, 68, "request's row", "label")
    d.row(TABLE_X, 36, [(str(block), "a") for block in BLOCK_TABLE])
    d.captions(TABLE_X, 28, ("0-1", "2-3", "4-5"), w=44)
    d.text(TABLE_X + 3 * 44 + 14, 28, "positions", "note")
    d.text(20, 166, "KV cache", "label")
    for block in range(NUM_BLOCKS):
        x = _block_x(block)
        d.text(x + CELL, 140, f"block {block}", "caption")
        for offset in range(BLOCK_SIZE):
            position = _position(block, offset)
            known = position is not None
            d.box(
                x + offset * CELL,
                148,
                CELL,
                46,
                "",
                "off" if not known else _kind(position),
            )
            if known:
                d.text(
                    x + (offset + 0.5) * CELL, 167, f"k {KEYS[position]:g}", "caption"
                )
                d.text(
                    x + (offset + 0.5) * CELL, 185, f"v {VALUES[position]:g}", "caption"
                )
    for entry, block in enumerate(BLOCK_TABLE):
        d.arrow(TABLE_X + (entry + 0.5) * 44, 72, _block_x(block) + CELL, 126)


def _gathered(d: Drawing) -> None:
    """Draw the keys and values in sequence order."""
    _step(d, 232, 1, "gather")
    d.captions(GATHERED_X, 226, range(len(KEYS)), w=CELL)
    d.text(GATHERED_X + len(KEYS) * CELL + 14, 226, "position in the sequence", "note")
    for row, (name, numbers) in enumerate((("k", KEYS), ("v", VALUES))):
        y = 234 + row * 34
        d.text(GATHERED_X - 22, y + 22, name, "label")
        cells = [(f"{each:g}", _kind(at)) for at, each in enumerate(numbers)]
        d.row(GATHERED_X, y, cells, w=CELL, h=30)


def _scores(d: Drawing) -> None:
    """Draw scores, mask, weights and outputs of both queries."""
    scores, weights, outputs = attend()
    for top, number, words in ((322, 2, "scale * q @ k"), (350, 3, "mask")):
        _step(d, top, number, words)
    _step(d, 426, 4, "softmax")
    _step(d, 530, 5, "weights @ v")
    for row, query in enumerate(QUERIES):
        y = 322 + row * 36
        d.text(GATHERED_X - 50, y + 22, f"q = {query:g}", "label")
        cells = [
            ("-inf", "off") if each == float("-inf") else (f"{each:g}", _kind(at))
            for at, each in enumerate(scores[row])
        ]
        d.row(GATHERED_X, y, cells, w=CELL, h=30)
        d.text(GATHERED_X + len(KEYS) * CELL + 14, y + 20, _whose(row), "note")
        y = 426 + row * 36
        cells = [
            (f"{each:.2f}", "off" if not each else _kind(at))
            for at, each in enumerate(weights[row])
        ]
        d.row(GATHERED_X, y, cells, w=CELL, h=30)
        d.text(GATHERED_X + len(KEYS) * CELL + 14, y + 20, "sum 1", "note")
        y = 530 + row * 36
        d.box(GATHERED_X, y, 2 * CELL, 30, f"{outputs[row]:.2f}", "new")
        products = " + ".join(
            f"{weight:.3f} * {value:g}"
            for weight, value in zip(weights[row], VALUES, strict=True)
            if weight
        )
        d.text(GATHERED_X + 2 * CELL + 14, y + 20, f"= {products}", "note")
    d.arrow(GATHERED_X + 2.5 * CELL, 302, GATHERED_X + 2.5 * CELL, 318)
    d.arrow(GATHERED_X + 2.5 * CELL, 394, GATHERED_X + 2.5 * CELL, 422)
    d.arrow(GATHERED_X + 2.5 * CELL, 498, GATHERED_X + 2.5 * CELL, 526)
    d.box(20, 612, 18, 18, "", "a")
    d.text(46, 626, "cached before this step", "note")
    d.box(210, 612, 18, 18, "", "new")
    d.text(236, 626, "new in this step", "note")
    d.box(370, 612, 18, 18, "", "off")
    d.text(396, 626, "masked, or a slot that the request does not use", "note")


def _step(d: Drawing, y: float, number: int, words: str) -> None:
    d.text(20, y + 20, f"{number}", "strong")
    d.text(34, y + 20, words, "label")


def _whose(row: int) -> str:
    return f"the token at position {len(KEYS) - len(QUERIES) + row}"


def _kind(position: int) -> str:
    return "new" if position >= len(KEYS) - len(QUERIES) else "a"


def _block_x(block: int) -> float:
    return CACHE_X + block * (2 * CELL + 14)


def _position(block: int, offset: int) -> int | None:
    """Return the position whose key is in a slot; None if the slot is not used."""
    if block not in BLOCK_TABLE:
        return None
    position = BLOCK_TABLE.index(block) * BLOCK_SIZE + offset
    return position if position < len(KEYS) else None
