"""The picture of parallel_step."""

from .drawing import Drawing

WORDS = (
    "A step on two ranks. Both attend with the query heads of both to their own keys, and send "
    "each other the rows and log-sum-exps of the other's heads."
)


def draw() -> Drawing:
    d = Drawing(700, 400, WORDS)
    draw_ranks(d, lefts=(90, 400), keys_at=124, result_at=176, box=52, pair=72, key=30)
    for y, words in (
        (104, "gather"),
        (198, "attend"),
        (292, "exchange"),
        (376, "combine"),
    ):
        d.text(4, y, words)
    return d


def draw_narrow() -> Drawing:
    d = Drawing(340, 400, WORDS)
    draw_ranks(d, lefts=(6, 180), keys_at=72, result_at=114, box=34, pair=52, key=20)
    for y, words in (
        (104, "gather"),
        (198, "attend"),
        (292, "exchange"),
        (376, "combine"),
    ):
        d.text(264, y, words)
    return d


def draw_ranks(
    d: Drawing,
    lefts: tuple[int, int],
    keys_at: int,
    result_at: int,
    box: int,
    pair: int,
    key: int,
) -> None:
    """Draw both ranks and what they exchange.

    Args:
        lefts: left edge of each rank.
        keys_at, result_at: of the keys and of the result, from that edge.
        box, pair, key: widths of a query, of a partial result, and of a key.
    """
    for rank, x in enumerate(lefts):
        other, kind = 1 - rank, "ab"[rank]
        d.text(x, 24, f"rank {rank}")
        d.row(x, 36, [(f"Q{rank}", kind)], w=box)
        d.row(x, 130, [("Q0", "a"), ("Q1", "b")], w=box)
        keys = [p for p in range(8) if p // 2 % 2 == rank]
        d.row(x + keys_at, 130, [(f"k{p}", kind) for p in keys], w=key)
        d.row(x, 224, [(f"O0, {rank}", "a"), (f"O1, {rank}", "b")], w=pair)
        d.row(x, 318, [(f"O{rank}, 0", kind), (f"O{rank}, 1", kind)], w=pair)
        d.row(x + result_at, 318, [(f"O{rank}", kind)], w=box)
        d.arrow(x + 2 * pair + 2, 335, x + result_at - 2, 335)
        d.arrow(x + box // 2, 70, x + box // 2 + box * rank, 128)
        d.arrow(x + box, 164, x + pair, 222)
        middle = x + pair // 2 + pair * rank
        d.arrow(middle, 258, middle, 316)
        # what goes to the other rank
        there = lefts[other]
        d.arrow(x + box // 2, 70, there + box // 2 + box * rank, 128)
        d.arrow(x + pair // 2 + pair * other, 258, there + pair // 2 + pair * rank, 316)
