"""The worked examples and the picture of encoder_attention."""

from rich.text import Text

from .drawing import DIM, NEW, A, beside, boxes, said
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    views = [
        [Text(), Text("token 0 attends to"), Text()],
        boxes([("7", NEW), ("2", DIM), ("4", DIM)]),
        [Text(), Text("-> 7", style=NEW), Text()],
        [Text(), Text("  tokens 1 and 2 see"), Text()],
        boxes([("7", DIM), ("2", A), ("4", A)]),
        [Text(), Text("-> 3", style=NEW), Text()],
    ]
    return [
        *said("The concatenated values of two requests; no block table:", ""),
        *boxes([("7", NEW), ("2", A), ("4", A)]),
        *said(""),
        *beside(*views),
    ]


EXAMPLES = (
    Example(
        "encoder_attention",
        "The lone token gets its own value, the other two the mean of both of theirs.",
        (
            StoryStep(
                "The second request's keys and values begin at 1 and end before 3.",
                "torch.tensor([7.0, 2.0, 4.0])[1:3].tolist()",
                "[2.0, 4.0]",
                step="gather the sequence's keys and values",
            ),
            StoryStep(
                "Query times key times scale: 1 * 1 * 1 / sqrt(1) = 1, for every pair.",
                "1.0 * 1.0 * 1**-0.5",
                "1.0",
                step="compute the scaled dot products of queries and keys",
            ),
            StoryStep(
                "Nothing is masked: a token attends to the tokens before it and after it.",
                "[[True for key in (0, 1)] for query in (0, 1)]",
                "[[True, True], [True, True]]",
                step="mask the keys outside the visible range",
            ),
            StoryStep(
                "Two equal scores: relative to the largest one each exponential is 1, and each"
                " weight 1 / (1 + 1).",
                "(math.exp(1 - 1), 1 / (1 + 1))",
                "(1.0, 0.5)",
                step="turn scores into weights (softmax)",
            ),
            StoryStep(
                "The lone token gets 1 * 7, the others 0.5 * 2 + 0.5 * 4.",
                "(1 * 7.0, 0.5 * 2 + 0.5 * 4)",
                "(7.0, 3.0)",
                step="average the values by the weights",
            ),
        ),
    ),
)
