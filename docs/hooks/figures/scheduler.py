"""The picture of scheduler."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        760,
        170,
        "Four steps of two requests with a budget of 4 new tokens. In step 3 request "
        "b is preempted;"
        " in step 4 it finds 2 of its 5 tokens in the cache.",
    )
    a, b, off = ("a", "a"), ("b", "b"), ("", "off")
    states = (
        (20, "step 1", [a, a, a, b]),
        (205, "step 2", [a, b, b, b]),
        (390, "step 3: b preempted", [a, off, off, off]),
        (575, "step 4: b again", [("b", "new"), ("b", "new"), ("b", "new"), off]),
    )
    for x, name, cells in states:
        d.text(x, 34, name)
        d.row(x, 52, cells, w=38)
    d.text(
        20,
        130,
        "Each cell is a new token. A decode takes one cell, a prompt what is left.",
    )
    return d
