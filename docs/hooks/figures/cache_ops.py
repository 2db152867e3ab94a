"""The picture of cache_ops."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        700,
        292,
        "A write scatters tokens to their slots (token 1 has none). A gather follows "
        "the block table and returns a sequence in order.",
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
    d.text(110, 261, "through the row 2, 0", "note")
    d.text(330, 84, "FP8: divided by the scale, rounded", "note")
    d.text(110, 279, "FP8: times the scale", "note")
    d.arrow(110 + 2 * 196 + 88, 184, 418, 242)
    d.arrow(198, 184, 550, 242)
    return d
