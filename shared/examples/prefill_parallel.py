"""The worked examples and the picture of prefill_parallel."""

from rich.text import Text

from .drawing import A, B, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    ranks = [0, 0, 1, 1, 1, 1, 0, 0]
    cells = [(f"p{p}", B if rank else A) for p, rank in enumerate(ranks)]
    return [
        *said(
            "Eight positions of a prompt in four chunks. Under them the rank, and the keys"
        ),
        *said("that each position attends to:", ""),
        *boxes(cells),
        under([str(rank) for rank in ranks]),
        under([str(p + 1) for p in range(8)]),
        *said("", "Rank 0: 1 + 2 + 7 + 8 = 18 keys. Rank 1: 3 + 4 + 5 + 6 = 18."),
    ]


EXAMPLES = (
    Example(
        "PrefillContextParallel",
        "Both chunks of a prompt of three tokens on one rank.",
        (
            StoryStep(
                "One rank has two chunks. They end before positions 3 * 1 // 2 and 3 * 2 // 2.",
                "[3 * index // 2 for index in (1, 2)]",
                "[1, 3]",
                step="cut each prompt into two chunks per rank, and find the rows of its keys",
            ),
            StoryStep(
                "With one rank, the gathered keys are its own three.",
                "len(share.tokens) * RankGroup().world_size",
                "3",
                step="gather the keys and values of all ranks",
            ),
            StoryStep(
                "They are in order already. The fourth slot fills the last block of two.",
                "share.gathered_rows.tolist()",
                "[0, 1, 2, 0]",
                step="put them into the order of their positions",
            ),
            StoryStep(
                "All keys are equal: each token gets the mean of the values up to its own.",
                "[3 / 1, (3 + 5) / 2, (3 + 5 + 7) / 3]",
                "[3.0, 4.0, 5.0]",
                step="attend to the keys up to the end of each chunk",
            ),
        ),
    ),
)
