"""The picture of index: two requests, their block-table rows, and the cache that both share.

It is the cache after the step of `one_step`.
"""

from typing import NamedTuple

from .drawing import Drawing
from .one_step import BLOCK_SIZE, CONTEXT, KINDS, NEW, NUM_BLOCKS, TABLE

LENGTHS = tuple(context + new for context, new in zip(CONTEXT, NEW, strict=True))
TOP, PITCH, CELL_HEIGHT = 44, 46, 34


class Layout(NamedTuple):
    """Sizes of the figure: of the whole, and of its parts.

    Args:
        table: Left edge of the entries of the block table.
        cell: Width of an entry.
        cache: Left edge of the names of the blocks.
        slot: Width of a slot.
        slots_named: If true, each block has the numbers of its slots.
    """

    width: int
    margin: int
    table: int
    cell: int
    cache: int
    slot: int
    slots_named: bool


WIDE = Layout(760, 12, 92, 56, 300, 62, True)
NARROW = Layout(340, 6, 62, 38, 150, 32, False)


def draw() -> Drawing:
    return _draw(WIDE)


def draw_narrow() -> Drawing:
    return _draw(NARROW)


def _draw(sizes: Layout) -> Drawing:
    rows = "; ".join(
        f"request {kind} has {length} tokens and the row {list(row)}"
        for kind, length, row in zip(KINDS, LENGTHS, TABLE, strict=True)
    )
    d = Drawing(
        sizes.width,
        TOP + NUM_BLOCKS * PITCH,
        "A row of the block table lists the blocks of a request, in the order of its tokens. A"
        " block can be anywhere in the cache. a0 is the token of request a at position 0.",
        f"Two rows of a block table, and a KV cache of {NUM_BLOCKS} blocks of {BLOCK_SIZE} slots."
        f" {rows}. An arrow leads from each entry to its block. Blocks 0 and 3 are free.",
    )
    d.text(sizes.cache, 22, "KV cache", "head")
    for block in range(NUM_BLOCKS):
        _block(d, sizes, block)
    for req, row in enumerate(TABLE):
        y = TOP + req * 3 * PITCH
        d.text(sizes.margin, y - 22, f"request {KINDS[req]}", "head")
        d.text(sizes.margin, y - 4, f"{LENGTHS[req]} tokens", "note")
        for entry, block in enumerate(row):
            top = y + 8 + entry * PITCH
            d.text(sizes.margin, top + 22, f"entry {entry}", "note")
            d.box(sizes.table, top, sizes.cell, CELL_HEIGHT, str(block), KINDS[req])
            d.side_arrow(
                sizes.table + sizes.cell + 3,
                top + CELL_HEIGHT / 2,
                sizes.cache - 4,
                TOP + block * PITCH + CELL_HEIGHT / 2,
            )
    return d


def _block(d: Drawing, sizes: Layout, block: int) -> None:
    """Draw a block of the cache, with the tokens that its slots hold."""
    y, left = TOP + block * PITCH, sizes.cache + 52
    d.text(sizes.cache, y + 22, f"block {block}", "note")
    for offset in range(BLOCK_SIZE):
        words, kind = token_in(block, offset)
        d.box(left + offset * sizes.slot, y, sizes.slot, CELL_HEIGHT, words, kind)
    if sizes.slots_named:
        first = block * BLOCK_SIZE
        words = f"slots {first} to {first + BLOCK_SIZE - 1}"
        d.text(left + BLOCK_SIZE * sizes.slot + 14, y + 22, words, "note")


def token_in(block: int, offset: int) -> tuple[str, str]:
    """Return the name of the token in a slot and the class of its request."""
    for req, row in enumerate(TABLE):
        if block in row:
            position = row.index(block) * BLOCK_SIZE + offset
            if position < LENGTHS[req]:
                return f"{KINDS[req]}{position}", KINDS[req]
    return "", "off"
