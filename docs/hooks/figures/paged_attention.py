"""The picture of paged_attention."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        720,
        272,
        "Visible keys: rows are new tokens, columns are the keys of their sequence. "
        "The new tokens are always the last ones.",
    )
    panels = (
        (20, "prefill: 4 new of 4", 4, 4),
        (260, "chunk: 2 new of 6", 2, 6),
        (540, "decode: 1 new of 5", 1, 5),
    )
    size = 30
    for x, title, queries, keys in panels:
        d.text(x, 28, title)
        d.captions(x, 58, range(keys), w=size)
        for query in range(queries):
            position = keys - queries + query
            cells = [("", "a" if key <= position else "off") for key in range(keys)]
            cells[position] = ("", "new")
            d.row(x, 68 + query * size, cells, w=size, h=size)
    d.box(20, 218, 22, 22, "", "a")
    d.text(50, 234, "visible, from the cache", "note")
    d.box(220, 218, 22, 22, "", "new")
    d.text(250, 234, "visible, the token's own key", "note")
    d.box(430, 218, 22, 22, "", "off")
    d.text(460, 234, "masked: a later key", "note")
    return d
