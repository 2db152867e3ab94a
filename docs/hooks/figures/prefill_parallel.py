"""The picture of prefill_parallel."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        700,
        270,
        "A prompt of eight tokens in four chunks. Rank 0 has the first and the last one. Each rank "
        "computes 18 pairs of query and key.",
    )
    ranks = [0, 0, 1, 1, 1, 1, 0, 0]
    d.text(20, 52, "the prompt")
    d.row(150, 30, [(f"p{p}", "ab"[rank]) for p, rank in enumerate(ranks)], w=60)
    d.captions(150, 82, [p + 1 for p in range(8)], w=60)
    for rank, y in ((0, 120), (1, 180)):
        own = [p for p in range(8) if ranks[p] == rank]
        d.text(20, y + 22, f"rank {rank}")
        d.row(150, y, [(f"p{p}", "ab"[rank]) for p in own], w=60)
        pairs = " + ".join(str(p + 1) for p in own)
        d.text(410, y + 22, f"{pairs} = {sum(p + 1 for p in own)}")
    d.text(150, 252, "below the prompt: keys that a token attends to")
    return d
