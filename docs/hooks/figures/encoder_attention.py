"""The picture of encoder_attention."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        720,
        236,
        "Visible keys without a cache: rows are queries, columns are keys. Requests "
        "are concatenated and do not attend to each other.",
    )
    size = 30
    d.text(20, 28, "encoder: requests of 1 and 3")
    d.captions(20, 58, range(4), w=size)
    for query, own in enumerate(((0, 1), (1, 4), (1, 4), (1, 4))):
        cells = [("", "a" if own[0] <= key < own[1] else "off") for key in range(4)]
        cells[query] = ("", "new")
        d.row(20, 68 + query * size, cells, w=size, h=size)
    d.text(260, 28, "window of 2, both sides")
    d.captions(260, 58, range(5), w=size)
    for query in range(4):
        cells = [("", "a" if abs(key - query) < 2 else "off") for key in range(5)]
        cells[query] = ("", "new")
        d.row(260, 68 + query * size, cells, w=size, h=size)
    d.text(500, 28, "cross: 2 queries on 5 keys")
    d.captions(500, 58, range(5), w=size)
    for query in range(2):
        d.row(500, 68 + query * size, [("", "b")] * 5, w=size, h=size)
    d.box(20, 204, 22, 22, "", "new")
    d.text(50, 220, "the token's own key", "note")
    d.box(200, 204, 22, 22, "", "a")
    d.text(230, 220, "visible", "note")
    d.box(310, 204, 22, 22, "", "b")
    d.text(340, 220, "visible, key of the encoder", "note")
    d.box(530, 204, 22, 22, "", "off")
    d.text(560, 220, "hidden", "note")
    return d
