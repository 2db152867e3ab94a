"""The picture of encoder_decoder."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        720,
        262,
        "Rows are queries, columns are keys: three tokens of an encoder, two of a "
        "decoder.",
    )
    size = 34
    panels = (
        (60, "encoder", 3, 3, "a", ("e0", "e1", "e2"), ("e0", "e1", "e2")),
        (290, "encoder_decoder", 2, 3, "a", ("d0", "d1"), ("e0", "e1", "e2")),
        (540, "decoder", 2, 2, "b", ("d0", "d1"), ("d0", "d1")),
    )
    tables = ("no table", "cross_block_tables", "block_tables")
    lens = ("encoder_seq_lens", "encoder_seq_lens", "seq_lens")
    for panel, table, length in zip(panels, tables, lens, strict=True):
        x, title, queries, keys, kind, rows, columns = panel
        d.text(x, 28, title)
        d.captions(x, 58, columns, w=size)
        for query in range(queries):
            y = 68 + query * size
            d.text(x - 18, y + 22, rows[query], "caption")
            cells = []
            for key in range(keys):
                masked = title == "decoder" and key > query
                cells.append(("", "off" if masked else kind))
            d.row(x, y, cells, w=size, h=size)
        d.text(x, 206, length, "note")
        d.text(x, 228, table, "note")
    d.box(60, 240, 16, 16, "", "off")
    d.text(84, 253, "masked: a later key", "note")
    return d
