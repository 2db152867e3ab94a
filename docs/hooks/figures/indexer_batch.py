"""The picture of indexer_batch."""

from .drawing import Drawing

LENS, NEW = (5, 3), (3, 1)


def draw() -> Drawing:
    d = Drawing(
        720,
        330,
        "Above: the keys of two requests are gathered one after the other. Below: the three new "
        "tokens of request 0 and the one of request 1 score a range of them each, which starts at "
        "the first key of the request and ends at the key of the token.",
    )
    starts = (0, LENS[0])
    d.text(20, 62, "gathered keys")
    cells = [(f"r{req} k{key}", "a") for req, n in enumerate(LENS) for key in range(n)]
    d.row(160, 40, cells, w=64)
    rows = [
        (starts[req], starts[req] + LENS[req] - NEW[req] + new + 1)
        for req in range(2)
        for new in range(NEW[req])
    ]
    for row, (first, end) in enumerate(rows):
        y = 100 + 50 * row
        d.text(20, y + 22, f"row {row}")
        seen = [
            ("", "new" if first <= key < end else "off") for key in range(sum(LENS))
        ]
        d.row(160, y, seen, w=64)
    return d
