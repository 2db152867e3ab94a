"""The worked examples and the picture of paged_attention."""

from rich.text import Text

from .drawing import DIM, NEW, A, beside, boxes, said
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    values = [[0, 1], [2, 3], [4, 5]]
    cache = beside(
        *(
            [
                Text(f"block {block}"),
                *boxes([(str(token), A if block == 2 else DIM) for token in pair]),
            ]
            for block, pair in enumerate(values)
        )
    )
    views = [
        [Text(), Text("token 0 attends to"), Text()],
        boxes([("4", NEW), ("x", DIM)]),
        [Text(), Text("-> 4", style=NEW), Text()],
        [Text(), Text("  token 1 attends to"), Text()],
        boxes([("4", NEW), ("5", NEW)]),
        [Text(), Text("-> 4.5", style=NEW), Text()],
    ]
    return [
        *said("The values in the cache; the sequence's row says block 2:", ""),
        *cache,
        *said(""),
        *beside(*views),
    ]


EXAMPLES = (
    Example(
        "paged_attention",
        "Token 0 gets its own value, token 1 the mean of both.",
        (
            StoryStep(
                "The sequence has 2 tokens, and its row says block 2. The values there are 4"
                " and 5; the keys are all 1.",
                "torch.arange(6.0).view(3, 2)[2].tolist()",
                "[4.0, 5.0]",
                step="gather the sequence's keys and values",
            ),
            StoryStep(
                "Query times key times scale: 1 * 1 * 1 / sqrt(1) = 1, for every pair.",
                "1.0 * 1.0 * 1**-0.5",
                "1.0",
                step="compute the scaled dot products of queries and keys",
            ),
            StoryStep(
                "Token 0 has position 0, so position 1 is masked for it. Token 1 attends to"
                " both.",
                "[[key <= query for key in (0, 1)] for query in (0, 1)]",
                "[[True, False], [True, True]]",
                step="mask the keys outside the visible range",
            ),
            StoryStep(
                "Token 0 has one score: weight 1. Token 1 has two equal ones: relative to the"
                " largest score each exponential is 1, and each weight 1 / (1 + 1).",
                "(math.exp(1 - 1), 1 / (1 + 1))",
                "(1.0, 0.5)",
                step="turn scores into weights (softmax)",
            ),
            StoryStep(
                "Token 0 gets 1 * 4, token 1 gets 0.5 * 4 + 0.5 * 5.",
                "(1 * 4.0, 0.5 * 4 + 0.5 * 5)",
                "(4.0, 4.5)",
                step="average the values by the weights",
            ),
        ),
    ),
)
