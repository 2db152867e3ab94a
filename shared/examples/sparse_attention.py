"""The worked examples and the picture of sparse_attention."""

from rich.text import Text

from .drawing import DIM, NEW, A, beside, boxes, said
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    cache = boxes([("0", A), ("1", DIM), ("2", DIM), ("3", A)])
    row = boxes([("3", NEW), ("-1", DIM), ("0", NEW)])
    between = [Text(), Text("the row of token 0:"), Text()]
    return [
        *said("Four slots with the values 0 to 3, as blocks of one:", ""),
        *cache,
        *said(""),
        *beside(between, row, [Text(), Text("-> 1.5", style=NEW), Text()]),
    ]


EXAMPLES = (
    Example(
        "convert_req_index_to_global_index",
        "One token selects positions 5, 0 and 8 of a sequence with two blocks of four.",
        (
            StoryStep(
                "One rank stores all tokens, so a position is its own.",
                "[position // 1 // 1 * 1 for position in (5, 0, 8)]",
                "[5, 0, 8]",
                step="find the rank of the position, and its position there",
            ),
            StoryStep(
                "-1 selects nothing, and 8 is past the end of two blocks of four.",
                "[p for p in (5, -1, 0, 8) if 0 <= p < 2 * 4]",
                "[5, 0]",
                step="skip what has no slot",
            ),
            StoryStep(
                "Position 5 has offset 1 in entry 1, block 2. Position 0 starts block 7.",
                "[2 * 4 + 5 % 4, 7 * 4 + 0 % 4]",
                "[9, 28]",
                step="look up the slot in the request's row",
            ),
        ),
    ),
    Example(
        "sparse_attention",
        "Token 0 names two of four slots, token 1 names none.",
        (
            StoryStep(
                "Token 0 has the slots 3 and 0, in this order.",
                "[slot for slot in (3, -1, 0) if slot >= 0]",
                "[3, 0]",
                step="leave out the entries without a slot",
            ),
            StoryStep(
                "Slot 3 is offset 1 of block 1, slot 0 offset 0 of block 0.",
                "[torch.arange(4.0).view(2, 2)[s // 2, s % 2].item() for s in (3, 0)]",
                "[3.0, 0.0]",
                step="gather the keys and values of the slots",
            ),
            StoryStep(
                "Query times key times scale: 1 * 1 * 1 / sqrt(1) = 1, for both keys.",
                "1.0 * 1.0 * 1**-0.5",
                "1.0",
                step="compute the scaled dot products of the query and the keys",
            ),
            StoryStep(
                "Two equal scores: relative to the larger one each exponential is 1, and each"
                " weight 1 / (1 + 1).",
                "(math.exp(1 - 1), 1 / (1 + 1))",
                "(1.0, 0.5)",
                step="turn scores into weights (softmax)",
            ),
            StoryStep(
                "Token 0 gets 0.5 * 3 + 0.5 * 0. Token 1 has no weight, and gets 0.",
                "(0.5 * 3 + 0.5 * 0, 0.0)",
                "(1.5, 0.0)",
                step="average the values by the weights",
            ),
        ),
    ),
)
