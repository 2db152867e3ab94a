"""The worked examples and the picture of multimodal_prefix."""

from rich.text import Text

from .drawing import DIM, NEW, A, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    image = {2, 3, 5, 6}
    cells = [(f"p{p}", NEW if p in image else A) for p in range(9)]
    seen = ["yes"] * 4 + [""] * 5
    both = ["yes"] * 7 + [""] * 2
    return [
        *said("A prompt with an image in two rows, at positions 2, 3 and 5, 6:", ""),
        *boxes(cells),
        Text.assemble(("keys of position 2, the first of its range (2, 3):", DIM)),
        under(seen),
        Text.assemble(("keys of position 5, the first of its range (5, 6):", DIM)),
        under(both),
    ]


EXAMPLES = (
    Example(
        "compute_mm_prefix_ranges",
        "An image of two rows, with a mark between them.",
        (
            StoryStep(
                "Positions 2 to 6 are the image. The one in the middle, 4, is no"
                " embedding, so there are two runs.",
                "[2 + i for i, flag in enumerate([1, 1, 0, 1, 1]) if flag]",
                "[2, 3, 5, 6]",
                step="find the runs of consecutive tokens",
            ),
            StoryStep(
                "Without a window both are kept. With a window of 1 both are dropped.",
                "[last - first + 1 for first, last in [(2, 3), (5, 6)]]",
                "[2, 2]",
                step="drop ranges longer than the window",
            ),
        ),
    ),
    Example(
        "compute_mm_prefix_range_tensor",
        "Two requests; the second has no image.",
        (
            StoryStep(
                "Request 0 has two ranges, so every request gets two entries. (0, 0) fills"
                " it: position 0 always attends to itself.",
                "max(len([(0, 2), (6, 7)]), len([]))",
                "2",
            ),
        ),
    ),
    Example(
        "fill_mm_prefix_query_ranges",
        "Three new tokens; the last two begin an image.",
        (
            StoryStep(
                "The sequence has 7 tokens, 3 of them new: positions 4, 5 and 6. The image"
                " covers 5 to 9, so tokens 1 and 2 are in it.",
                "[token for token in range(3) if 5 <= 7 - 3 + token <= 9]",
                "[1, 2]",
                step="find the new tokens inside a range",
            ),
            StoryStep(
                "Nothing is clamped here. With a window of 2, position 6 would attend to"
                " 5 and later keys, so its range (5, 9) would stay as it is; that of position"
                " 8 would begin at 7.",
                "[max(5, position - 2 + 1) for position in (6, 8)]",
                "[5, 7]",
                step="let the range begin in the token's window",
            ),
            StoryStep(
                "Token 0 is text: (-1, -1). Row 3 is not used and does not change.",
                "(out[0].tolist(), out[3].tolist())",
                "([-1, -1], [0, 0])",
                step="write a row for every new token",
            ),
        ),
    ),
)
