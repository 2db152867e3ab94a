"""The worked examples and the picture of parallel_step."""

from rich.text import Text

from .drawing import A, B, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    cells = [(f"p{p}", B if p // 2 % 2 else A) for p in range(8)]
    return [
        *said(
            "Eight positions on two ranks, two in a row. Under them the rank, and the"
        ),
        *said("split of four that one position each gives:", ""),
        *boxes(cells),
        under([str(p // 2 % 2) for p in range(8)]),
        under([str(p % 4) for p in range(8)]),
        *said("", "Splits 0 and 1 are on rank 0, splits 2 and 3 on rank 1."),
    ]


EXAMPLES = (
    Example(
        "DecodeContextParallel",
        "One rank writes a token and attends to four keys in three splits.",
        (
            StoryStep(
                "The sequence has four tokens, and the new one is the last.",
                "4 - 1",
                "3",
                step="find each token's position",
            ),
            StoryStep(
                "Block 2 has slots 4 and 5, block 0 has slots 0 and 1: the keys of positions"
                " 0 to 3. Split 0 has positions 0 and 3, so slots 4 and 1.",
                "[[2, 0][p // 2] * 2 + p % 2 for p in range(4) if p % 3 == 0]",
                "[4, 1]",
                step="find the slots of the split's keys",
            ),
            StoryStep(
                "The new token attends to two keys of split 0 and to one of each other.",
                "[sum(p % 3 == split for p in range(4)) for split in range(3)]",
                "[2, 1, 1]",
                step="count its keys up to that position",
            ),
            StoryStep(
                "Position 3 is the second token of block 0, and the only rank stores it.",
                "0 * 2 + 3 % 2",
                "1",
                step="find the new token's slot if this rank stores it",
            ),
            StoryStep(
                "Slot 1 now holds the value 7.",
                "values.flatten()[1].item()",
                "7.0",
                step="write each token that has a slot on this rank",
            ),
            StoryStep(
                "There is one rank, so the queries of all ranks are its own.",
                "RankGroup().world_size",
                "1",
                step="gather the query heads of all ranks",
            ),
            StoryStep(
                "All keys are equal, so the result of a split is the mean of its values: 4 and"
                " 7, then 5, then 0.",
                "[(4 + 7) / 2, 5 / 1, 0 / 1]",
                "[5.5, 5.0, 0.0]",
                step="attend to the splits that this rank stores",
            ),
            StoryStep(
                "Their weights are as the numbers of keys: 2, 1 and 1 of 4.",
                "(2 * 5.5 + 1 * 5.0 + 1 * 0.0) / 4",
                "4.0",
                step="exchange partial results, and combine them by log-sum-exp",
            ),
            StoryStep(
                "No sinks are given, so the total weight is that of the four keys.",
                "2 + 1 + 1",
                "4",
                step="count the sinks once, after all keys",
            ),
        ),
    ),
)
