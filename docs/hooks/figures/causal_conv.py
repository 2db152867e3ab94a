"""The picture of causal_conv."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        700,
        190,
        "Prompts of 8 and 17 tokens in chunks of 8. Two lists give the request and "
        "the chunk of each program.",
    )
    widths = ((8, "a"), (8, "b"), (8, "b"), (1, "b"))
    x = 150.0
    d.text(20, 54, "tokens")
    for count, kind in widths:
        d.box(x, 32, 20 * count, 34, str(count), kind)
        x += 20 * count
    d.text(20, 118, "request")
    d.text(20, 160, "chunk of it")
    lists = ((96, [0, 1, 1, 1, -1, -1]), (138, [0, 0, 1, 2, -1, -1]))
    for y, values in lists:
        kinds = ["a", "b", "b", "b", "off", "off"]
        cells = [(str(v), kind) for v, kind in zip(values, kinds, strict=True)]
        d.row(150, y, cells, w=60)
    d.text(525, 118, "... 2,048 programs")
    d.text(525, 160, "-1: padding")
    return d
