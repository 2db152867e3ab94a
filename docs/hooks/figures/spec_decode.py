"""The picture of spec_decode."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        700,
        170,
        "Four queries of two requests: one axis, then two. The memory is the same.",
    )
    flat = [("q0", "a"), ("q1", "a"), ("q2", "b"), ("q3", "b")]
    d.text(20, 40, "[tokens, heads, size]")
    d.row(20, 54, flat, w=56)
    d.captions(20, 106, range(4), w=56)
    d.arrow(260, 71, 400, 71)
    d.text(286, 62, "a view")
    d.text(420, 40, "[reqs, query_len, heads, size]")
    d.row(420, 54, flat[:2], w=56)
    d.row(420, 98, flat[2:], w=56)
    d.text(545, 76, "request 0")
    d.text(545, 120, "request 1")
    return d
