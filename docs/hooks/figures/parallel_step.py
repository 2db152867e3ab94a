"""The picture of parallel_step."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        700,
        400,
        "A step on two ranks. Both attend with the query heads of both to their own keys, and send "
        "each other the rows and log-sum-exps of the other's heads.",
    )
    for rank, x in ((0, 90), (1, 400)):
        other, kind = 1 - rank, "ab"[rank]
        d.text(x, 24, f"rank {rank}")
        d.row(x, 36, [(f"Q{rank}", kind)], w=52)
        d.row(x, 130, [("Q0", "a"), ("Q1", "b")], w=52)
        keys = [p for p in range(8) if p // 2 % 2 == rank]
        d.row(x + 124, 130, [(f"k{p}", kind) for p in keys], w=30)
        d.row(x, 224, [(f"O0, {rank}", "a"), (f"O1, {rank}", "b")], w=72)
        d.row(x, 318, [(f"O{rank}, 0", kind), (f"O{rank}, 1", kind)], w=72)
        d.row(x + 176, 318, [(f"O{rank}", kind)], w=52)
        d.arrow(x + 146, 335, x + 174, 335)
        d.arrow(x + 26, 70, x + 26 + 52 * rank, 128)
        d.arrow(x + 52, 164, x + 72, 222)
        d.arrow(x + 36 + 72 * rank, 258, x + 36 + 72 * rank, 316)
        # what goes to the other rank
        there = 400 if other else 90
        d.arrow(x + 26, 70, there + 26 + 52 * rank, 128)
        d.arrow(x + 36 + 72 * other, 258, there + 36 + 72 * rank, 316)
    for y, words in (
        (104, "gather"),
        (198, "attend"),
        (292, "exchange"),
        (376, "combine"),
    ):
        d.text(4, y, words)
    return d
