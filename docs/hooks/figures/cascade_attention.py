"""The picture of cascade_attention."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        760,
        250,
        "Both rows begin with block 2. It is read once, for both queries as one "
        "request. Then each query reads its own block.",
    )
    d.text(20, 30, "the prefix, through row 0")
    d.row(20, 44, [("4", "new"), ("5", "new")], w=60)
    d.captions(20, 96, ["block 2"], w=120)
    for req, (y, kind) in enumerate(((44, "a"), (164, "b"))):
        d.text(330, y - 14, f"the rest of request {req}")
        d.row(330, y, [(str(2 * req), kind)], w=60)
        d.captions(330, y + 52, [f"block {req}"], w=60)
        d.arrow(142, 61, 326, y + 17)
        d.text(530, y - 14, "2/3 * 4.5 + 1/3 * own")
        d.box(530, y, 150, 34, ("3", "3.6667")[req], kind)
        d.arrow(392, y + 17, 526, y + 17)
    d.text(20, 150, "mean 4.5, weight 2")
    return d
