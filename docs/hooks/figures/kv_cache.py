"""The picture of kv_cache."""

from typing import NamedTuple

from .drawing import Drawing


class Layout(NamedTuple):
    """Sizes of the figure.

    Args:
        width: Width of the whole.
        left: Left edge of the boxes.
        full: Width of the cache.
        words: Words of the allocation, of a head with its number, and of a block and a slot.
    """

    width: int
    left: int
    full: int
    words: tuple[str, str, str, str]


WIDE = Layout(
    720,
    110,
    600,
    (
        "327,680 bytes (int8), allocated once",
        "head {}: 64",
        "one block: 16 slots",
        "one slot: one token's key, 8 heads",
    ),
)
NARROW = Layout(
    340, 62, 272, ("327,680 bytes (int8)", "64", "16 slots", "a key, 8 heads")
)


def draw() -> Drawing:
    return _draw(WIDE)


def draw_narrow() -> Drawing:
    return _draw(NARROW)


def _draw(sizes: Layout) -> Drawing:
    allocation, head, block_words, slot_words = sizes.words
    left, full = sizes.left, sizes.full
    margin = 20 if sizes is WIDE else 2
    block, slot = full / 20, full / 16
    d = Drawing(
        sizes.width,
        296,
        "One layer's cache of ten blocks: raw bytes, two halves, blocks, slots, and the elements of"
        " 8 heads.",
    )
    d.text(margin, 42, "bytes")
    d.box(left, 20, full, 34, allocation, "off")
    d.text(margin, 102, "halves")
    d.row(left, 80, [("keys", "a"), ("values", "b")], w=full / 2)
    d.text(margin, 162, "blocks")
    for half, kind in enumerate("ab"):
        cells = [(str(n), kind) for n in range(10)]
        d.row(left + half * full / 2, 140, cells, w=block)
    d.text(margin, 222, "slots")
    d.row(left, 200, [(str(n), "new") for n in range(16)], w=slot)
    d.arrow(left + 6.5 * block, 176, left + 6.5 * block, 197)
    d.text(left + 7.3 * block, 192, block_words, "note")
    d.text(margin, 277, "elements")
    d.row(left, 255, [(head.format(n), "new") for n in range(8)], w=full / 8)
    d.arrow(left + 4.5 * slot, 236, left + 4.5 * slot, 252)
    d.text(left + 5.9 * slot, 249, slot_words, "note")
    return d
