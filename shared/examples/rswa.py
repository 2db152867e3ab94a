"""The worked example and the picture of rswa."""

from rich.text import Text

from .drawing import DIM, NEW, A, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    cells = [(f"p{p}", A if p < 4 else NEW) for p in range(10)]
    seen = ["yes"] * 4 + [""] * 3 + ["yes"] * 2 + [""]
    return [
        *said("A prompt of 4 tokens, 6 that were generated, and a window of 2:", ""),
        *boxes(cells),
        Text.assemble(("keys of position 8:", DIM)),
        under(seen),
    ]


EXAMPLES = (
    Example(
        "fill_rswa_query_ranges",
        "Three new tokens; the first is the last one of the prompt.",
        (
            StoryStep(
                "The sequence has 6 tokens, 3 of them new: positions 3, 4 and 5.",
                "[6 - (3 - token) for token in range(3)]",
                "[3, 4, 5]",
                step="find the position of each new token",
            ),
            StoryStep(
                "The prompt has positions 0 to 3. All of it comes before the new tokens, so"
                " each range ends there. Row 3 has no token: (-1, -1).",
                "[min(4 - 1, position) for position in (3, 4, 5)]",
                "[3, 3, 3]",
                step="end the range with the prompt, or with the token",
            ),
        ),
    ),
)
