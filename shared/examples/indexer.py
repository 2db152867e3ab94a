"""The worked examples and the picture of indexer."""

from rich.text import Text

from .drawing import DIM, NEW, A, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    scores = [("5", A), ("1", DIM), ("5", A), ("7", A), ("5", DIM)]
    return [
        *said("One token's scores of five keys; three are selected:", ""),
        *boxes(scores),
        under([f"p{position}" for position in range(5)]),
        Text.assemble(
            ("7, and of the equal ones the lowest: ", DIM), ("p0 p2 p3", NEW)
        ),
    ]


EXAMPLES = (
    Example(
        "indexer_k_quant_and_cache",
        "A key of four elements is written to slot 1 of a block of two.",
        (
            StoryStep(
                "The largest size is 7, so the scale is 7 / 448. The codes mean 448 and -64.",
                "(7 / 448, 7 / (7 / 448), -1 / (7 / 448))",
                "(0.015625, 448.0, -64.0)",
                step="divide the largest size of each key by the largest code",
            ),
            StoryStep(
                "The token has slot 1.",
                "[slot for slot in (1,) if slot >= 0]",
                "[1]",
                step="skip tokens without a slot",
            ),
            StoryStep(
                "A block has 2 * 4 codes, then 2 scales of 4 bytes. The codes of slot 1 start at"
                " byte 4, its scale at byte 8 + 4.",
                "(1 * 4, 2 * 4 + 1 * 4)",
                "(4, 12)",
                step="store the codes and the scale",
            ),
        ),
    ),
    Example(
        "index_scores",
        "One token with two heads over two keys.",
        (
            StoryStep(
                "Both keys have the scale 7 / 448, and the codes 448 and -448 in their first"
                " element.",
                "(448 * 0.015625, -448 * 0.015625)",
                "(7.0, -7.0)",
                step="gather the sequence's codes and scales",
            ),
            StoryStep(
                "The heads have 1 and -1 there. Products below 0 become 0.",
                "[[max(q * k, 0) for k in (448, -448)] for q in (1, -1)]",
                "[[448, 0], [0, 448]]",
                step="compute each head's dot products, and cut them off below 0",
            ),
            StoryStep(
                "The weights are 1 and 0.5.",
                "((1 * 448 + 0.5 * 0) / 64, (1 * 0 + 0.5 * 448) / 64)",
                "(7.0, 3.5)",
                step="add them up by weight, and multiply by the scales of the keys",
            ),
            StoryStep(
                "The token is the last of two, so it has a score of both keys. Position 2"
                " has none.",
                "[position <= 1 for position in range(3)]",
                "[True, True, False]",
                step="leave out later keys",
            ),
        ),
    ),
    Example(
        "select_keys",
        "Two tokens select three keys at most.",
        (
            StoryStep(
                "Token 0 has five scores, token 1 one.",
                "[len([s for s in row if s > -math.inf]) for row in ([5, 1, 5, 7, 5], [2])]",
                "[5, 1]",
                step="leave out what has no score",
            ),
            StoryStep(
                "Token 0: 7 at position 3, then 5 at positions 0 and 2. Position 4 has 5 too, and"
                " is higher.",
                "sorted(range(5), key=lambda p: -[5, 1, 5, 7, 5][p])[:3]",
                "[3, 0, 2]",
                step="select the largest scores, and of equal ones the lowest positions",
            ),
            StoryStep(
                "Sorted, so that the sum of sparse attention has one order.",
                "sorted([3, 0, 2])",
                "[0, 2, 3]",
                step="return them in the order of positions",
            ),
        ),
    ),
)
