"""The picture of local_attention."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        700,
        250,
        "Visible keys: six tokens in chunks of 4, of which positions 2 to 5 are new. "
        "Each chunk that holds new tokens becomes a virtual request.",
    )
    size = 34
    for query in range(2, 6):
        d.text(20, 62 + (query - 2) * size, f"query p{query}")
        for key in range(6):
            is_visible = key // 4 == query // 4 and key <= query
            d.box(
                110 + key * size,
                40 + (query - 2) * size,
                size,
                size,
                "",
                ("a" if query < 4 else "b") if is_visible else "off",
            )
    d.captions(110, 32, [f"p{key}" for key in range(6)], w=size)
    d.captions(110, 196, [7, 7, 2, 2, 5, 5], w=size)
    d.text(20, 196, "block")
    d.arrow(330, 74, 420, 74)
    d.arrow(330, 142, 420, 142)
    d.text(430, 66, "virtual 0: 2 queries, 4 keys")
    d.row(430, 74, [("7", "a"), ("2", "a")], w=50, h=28)
    d.text(430, 134, "virtual 1: 2 queries, 2 keys")
    d.row(430, 142, [("5", "b"), ("5", "off")], w=50, h=28)
    d.text(430, 192, "rows of the new block table")
    d.text(110, 232, "A plain causal kernel on both gives this mask.")
    return d
