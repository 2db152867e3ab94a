"""The picture of tensor_parallel."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        700,
        240,
        "Eight query heads on four ranks. There are two KV heads, so two ranks store each.",
    )
    d.text(20, 52, "query heads")
    cells = [(f"q{head}", "b" if head // 4 else "a") for head in range(8)]
    d.row(150, 30, cells, w=60)
    d.captions(150, 82, [f"rank {head // 2}" for head in range(8)], w=60)
    d.text(20, 142, "KV heads")
    d.row(240, 120, [("kv0", "a")], w=60)
    d.row(480, 120, [("kv1", "b")], w=60)
    d.text(20, 202, "stored by")
    d.row(210, 180, [("rank 0", "a"), ("rank 1", "a")], w=60)
    d.row(450, 180, [("rank 2", "b"), ("rank 3", "b")], w=60)
    return d
