"""The picture of multimodal_prefix."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        700,
        330,
        "Visible keys of a prompt with an image in two rows, at positions 2, 3 and 5, "
        "6. Beyond the causal triangle only later tokens of the same range are "
        "visible.",
    )
    size = 30
    ranges = [(2, 3), (5, 6)]
    for query in range(9):
        d.text(20, 52 + query * size, f"query p{query}")
        for key in range(9):
            both = any(a <= query <= b and a <= key <= b for a, b in ranges)
            kind = "new" if both else "a" if key <= query else "off"
            d.box(110 + key * size, 32 + query * size, size, size, "", kind)
    d.captions(110, 24, [f"p{key}" for key in range(9)], w=size)
    d.text(410, 60, "ranges: (2, 3) and (5, 6)")
    d.text(410, 112, "p2: row (2, 3)")
    d.text(410, 142, "p4: row (-1, -1), a separator")
    d.text(410, 202, "p6: row (5, 6)")
    return d
