"""The picture of block_manager."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        760,
        190,
        "Three requests share blocks 0 and 1. Request c writes to block 2, which request a holds,"
        " so c gets block 4 and the content of block 2 is copied.",
    )
    states = (
        (20, "request a", [("0", "a"), ("1", "a"), ("2", "a")]),
        (205, "request b: prefix hit", [("0", "a"), ("1", "a"), ("3", "b")]),
        (390, "request c: fork of a", [("0", "a"), ("1", "a"), ("2", "a")]),
        (590, "request c after a write", [("0", "a"), ("1", "a"), ("4", "new")]),
    )
    for x, name, cells in states:
        d.text(x, 34, name)
        d.row(x, 52, cells, w=48)
    d.arrow(540, 69, 584, 69)
    d.text(20, 130, "ref_cnt of blocks 0 and 1: 3")
    d.text(390, 130, "blocks_to_copy: (2, 4)")
    d.text(
        20,
        160,
        "Freed blocks of known content stay cached; the last one is evicted first.",
    )
    return d
