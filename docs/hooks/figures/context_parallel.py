"""The picture of context_parallel."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        700,
        230,
        "Seven positions distributed over two ranks, two consecutive ones at a time. "
        "Each rank stores its positions without gaps.",
    )
    d.text(20, 52, "the sequence")
    cells = [(f"p{p}", "b" if p // 2 % 2 else "a") for p in range(7)]
    d.row(150, 30, cells, w=60)
    for rank, y in ((0, 110), (1, 170)):
        own = [p for p in range(7) if p // 2 % 2 == rank]
        d.text(20, y + 22, f"rank {rank}: {len(own)} tokens")
        kind = "ab"[rank]
        d.row(150, y, [(f"p{p}", kind) for p in own], w=60)
        d.captions(150, y + 50, range(len(own)), w=60)
    d.text(400, 132, "below the boxes: index in the rank's blocks")
    return d
