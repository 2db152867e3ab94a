"""The picture of block_manager."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        760,
        236,
        "Requests a, b and c share blocks 0 and 1. Request c must not write to block 2, which a"
        " holds too, so it gets a copy: block 4.",
    )
    rows = (
        (20, "request a", (("0", "a"), ("1", "a"), ("2", "a"))),
        (210, "b: prefix hit", (("0", "a"), ("1", "a"), ("3", "b"))),
        (400, "c: fork of a", (("0", "a"), ("1", "a"), ("2", "a"))),
        (590, "c writes", (("0", "a"), ("1", "a"), ("4", "new"))),
    )
    for x, title, cells in rows:
        d.text(x, 34, title)
        d.row(x, 46, cells, w=50)
    d.arrow(554, 63, 584, 63)
    d.text(20, 154, "block")
    d.text(20, 216, "references")
    d.row(150, 132, [(str(n), "off" if n == 4 else "a") for n in range(5)], w=72)
    d.captions(150, 216, [3, 3, 2, 1, 0], w=72)
    d.text(530, 154, "before c writes", "note")
    return d
