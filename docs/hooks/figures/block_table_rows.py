"""The picture of block_table_rows."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        700,
        190,
        "Two requests start, the second grows by a block, the first ends and its row "
        "is taken over. No entry of a longer row remains.",
    )
    states = (
        (20, "r0, r1 start", [["7", "2", "4"], ["5", "", ""]]),
        (265, "append_row([9], 1)", [["7", "2", "4"], ["5", "9", ""]]),
        (510, "move_row(1, 0)", [["5", "9", ""], ["5", "9", ""]]),
    )
    for x, name, rows in states:
        d.text(x, 34, name)
        for number, row in enumerate(rows):
            kinds = ["a" if number == 0 and x < 500 else "b"] * 3
            cells = [
                (block or "0", kind if block else "off")
                for block, kind in zip(row, kinds, strict=True)
            ]
            if name.startswith("append") and number == 1:
                cells[1] = ("9", "new")
            if x > 500 and number == 1:
                cells = [(block, "off") for block, _ in cells]
            d.row(x, 52 + 54 * number, cells, w=50)
    d.arrow(178, 96, 256, 96)
    d.arrow(423, 96, 501, 96)
    d.text(510, 178, "unused until the next request")
    return d
