"""The picture of slot_mapping."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        720,
        282,
        "Position 5 is entry 5 // 4 = 1 of the row: block 2. Its offset is 5 % 4 = 1: "
        "slot 2 * 4 + 1 = 9.",
    )
    d.text(20, 43, "positions")
    d.row(110, 20, [(str(n), "new" if n == 5 else "a") for n in range(10)])
    d.text(20, 123, "row")
    for entry, block in enumerate((7, 2, 5)):
        d.box(110 + entry * 176, 100, 176, 34, f"entry {entry}: block {block}", "a")
    d.text(20, 233, "slots")
    # the cache in memory order: block 2, then 5, then 7
    for index, (block, first) in enumerate(((2, 4), (5, 8), (7, 0))):
        x = 110 + index * 200
        cells = []
        for offset in range(4):
            position = first + offset
            kind = "new" if position == 5 else "a" if position < 10 else "off"
            cells.append((str(block * 4 + offset), kind))
        d.row(x, 210, cells)
        d.text(x + 88, 266, f"block {block}", "caption")
    d.arrow(110 + 5.5 * 44, 58, 110 + 5.5 * 44, 96)
    d.arrow(110 + 5.5 * 44, 138, 110 + 1.5 * 44, 206)
    d.text(372, 82, "5 // 4 = 1: entry of the row", "note")
    d.text(372, 182, "5 % 4 = 1: offset in the block", "note")
    return d
