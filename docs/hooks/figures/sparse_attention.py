"""The picture of sparse_attention."""

from .drawing import Drawing

TABLE, SELECTED = (7, 2), (5, 0)


def draw() -> Drawing:
    d = Drawing(
        700,
        360,
        "Above: a row of the block table has two blocks of four, and every slot of them is a key. "
        "Below: a token selects positions 5 and 0, whose slots are 9 and 28. Its row of slots is "
        "a row of a block table with blocks of one.",
    )
    slots = [block * 4 + offset for block in TABLE for offset in range(4)]
    named = [slots[position] for position in SELECTED]
    d.text(20, 62, "paged attention")
    d.row(170, 40, [(f"block {block}", "a") for block in TABLE], w=200)
    d.row(170, 90, [(str(slot), "a") for slot in slots], w=50)
    d.captions(170, 142, [f"p{position}" for position in range(8)], w=50)
    d.text(20, 112, "keys, by slot")
    d.text(20, 206, "the token selects")
    d.row(170, 184, [(f"p{position}", "new") for position in SELECTED], w=50)
    d.text(290, 206, "and two entries of -1")
    d.text(20, 266, "row of slots")
    d.row(
        170,
        244,
        [*((str(slot), "new") for slot in named), ("-1", "off"), ("-1", "off")],
        w=50,
    )
    d.text(20, 326, "keys, by slot")
    cells = [(str(slot), "new" if slot in named else "off") for slot in slots]
    d.row(170, 304, cells, w=50)
    return d
