"""The worked examples and the picture of context_parallel."""

from rich.text import Text

from .drawing import A, B, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    cells = [(f"p{p}", B if p // 2 % 2 else A) for p in range(7)]
    return [
        *said(
            "Seven positions distributed over two ranks, two in a row (under the boxes the"
        ),
        *said("rank, then the index among that rank's positions):", ""),
        *boxes(cells),
        under([str(p // 2 % 2) for p in range(7)]),
        under([str(p // 4 * 2 + p % 2) for p in range(7)]),
    ]


EXAMPLES = (
    Example(
        "get_dcp_ranks",
        "Two positions for rank 0, two for rank 1, and again.",
        (
            StoryStep(
                "Position 5 is in pair 5 // 2 = 2, and pairs go to the ranks in turn.",
                "5 // 2 % 2",
                "0",
            ),
        ),
    ),
    Example(
        "get_dcp_local_seq_lens",
        "Seven tokens on two ranks.",
        (
            StoryStep(
                "A round deals out 2 * 2 = 4 positions. One whole round gives each rank 2; of"
                " the 3 left, rank 0 gets 2 and rank 1 gets 1.",
                "[7 // 4 * 2 + min(7 % 4, 2), 7 // 4 * 2 + max(7 % 4 - 2, 0)]",
                "[4, 3]",
                step="count the positions that each rank stores",
            ),
            StoryStep(
                "No rank is given, so both counts are returned; their sum is 7.",
                "4 + 3",
                "7",
                step="select the requested rank",
            ),
        ),
    ),
    Example(
        "dcp_attention",
        "Rank 0 of two stores positions 0 and 2; two new tokens attend to them.",
        (
            StoryStep(
                "Three tokens on both ranks together, the last two new.",
                "[3 - 2 + new for new in (0, 1)]",
                "[1, 2]",
                step="find each token's position",
            ),
            StoryStep(
                "Of positions 0 and 1 rank 0 stores one; of 0, 1 and 2 it stores two.",
                "[sum(get_dcp_ranks(torch.arange(n), 2).eq(0)).item() for n in (2, 3)]",
                "[1, 2]",
                step="count the rank's keys up to that position",
            ),
            StoryStep(
                "They are adjacent in block 2, with values 4 and 5, and all keys are equal:"
                " the first new token gets 4, the second the mean. Rank 1 has the rest.",
                "(4 / 1, (4 + 5) / 2)",
                "(4.0, 4.5)",
                step="attend to these keys, with one request per token",
            ),
        ),
    ),
)
