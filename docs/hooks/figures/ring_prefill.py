"""The picture of ring_prefill."""

from .drawing import Drawing

RANKS = 3
WORDS = (
    "A prompt in six chunks on three ranks. A column is the round of a rank: the keys that it "
    "holds, and whether each of its two query chunks attends to them. Shares go to the next rank "
    "after each round."
)


def chunks_of(rank: int) -> tuple[int, int]:
    """Return the first and the second chunk of a rank."""
    return rank, 2 * RANKS - 1 - rank


def draw() -> Drawing:
    d = Drawing(700, 404, WORDS)
    for rank in range(RANKS):
        draw_rank(d, rank, left=100 + 200 * rank, width=44)
    for number in range(RANKS):
        d.text(4, 75 + 118 * number, f"round {number}")
    d.text(
        100,
        398,
        "+: all pairs; /: causal; empty: later keys. Rank 2 sends to rank 0.",
    )
    return d


def draw_narrow() -> Drawing:
    d = Drawing(340, 404, WORDS)
    for rank in range(RANKS):
        draw_rank(d, rank, left=22 + 108 * rank, width=28)
    d.text(22, 398, "+: all pairs; /: causal; empty: later keys")
    return d


def draw_rank(d: Drawing, rank: int, left: int, width: int) -> None:
    """Draw the rounds of a rank, one below the other."""
    d.text(left + width, 24, f"rank {rank}")
    for number in range(RANKS):
        owner, y = (rank - number) % RANKS, 52 + 118 * number
        kind = ("a", "b", "new")[owner]
        d.row(left + width, y, [(f"k{key}", kind) for key in chunks_of(owner)], width)
        for index, chunk in enumerate(chunks_of(rank)):
            cells = [
                (
                    "+" if key < chunk else "/" if key == chunk else "",
                    kind if key <= chunk else "off",
                )
                for key in chunks_of(owner)
            ]
            top = y + 34 + 26 * index
            d.text(left, top + 18, f"q{chunk}")
            d.row(left + width, top, cells, width, 26)
        if number < RANKS - 1:
            # below each share, to the share of the next rank
            step = 200 if width == 44 else 108
            x, end = left + 2 * width, left + 2 * width + step
            if rank < RANKS - 1:
                d.arrow(x, y + 88, end, y + 116)
