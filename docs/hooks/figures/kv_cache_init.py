"""The picture of kv_cache_init."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        720,
        250,
        "Four layers in two groups, two tensors: a block belongs to one group, in "
        "both tensors.",
    )
    blocks = [("0", "a"), ("1", "b"), ("2", "a"), ("3", "off")]
    for number, x in enumerate((60, 420)):
        first = 2 * number
        d.text(x, 30, f"layer {first}")
        d.text(x + 150, 30, f"layer {first + 1}")
        d.row(x, 96, blocks, w=60)
        d.text(x, 152, f"tensor {number}: layers {first} and {first + 1} use all of it")
        d.arrow(x + 25, 38, x + 30, 92)
        d.arrow(x + 25, 38, x + 150, 92)
        d.arrow(x + 175, 38, x + 90, 92)
    d.box(60, 176, 22, 22, "", "a")
    d.text(92, 193, "group 0, layers 0 and 2: one block table, [0, 2]")
    d.box(60, 208, 22, 22, "", "b")
    d.text(92, 225, "group 1, layers 1 and 3: one block table, [1]")
    return d
