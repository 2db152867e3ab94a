"""The worked examples and the picture of causal_conv."""

from rich.text import Text

from .drawing import DIM, A, B, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    cells = [("8", A), ("8", B), ("8", B), ("1", B), ("", DIM), ("", DIM)]
    return [
        *said("Prompts of 8 and 17 tokens in chunks of 8, one program each. Under the"),
        *said(
            "boxes each program's request, then the chunk's number in its request:", ""
        ),
        *boxes(cells),
        under(["r0", "r1", "r1", "r1", "-1", "-1"]),
        under(["0", "0", "1", "2", "-1", "-1"]),
    ]


EXAMPLES = (
    Example(
        "compute_causal_conv1d_metadata",
        "Two prompts have four chunks; the programs after them return at once.",
        (
            StoryStep(
                "8 tokens are one chunk of 8; 17 tokens are two of 8 and one of 1.",
                "[-(-8 // 8), -(-17 // 8)]",
                "[1, 3]",
                step="divide each prompt into chunks",
            ),
            StoryStep(
                "Program 3 finds request 1 and chunk 2 of it: its token 16 alone.",
                "(request[3].item(), offset[3].item(), 2 * 8)",
                "(1, 2, 16)",
                step="number the chunks of each prompt",
            ),
            StoryStep(
                "The lists hold twice 1,024 chunks, so most steps use the same buffers.",
                "(len(request), 2 * 1024)",
                "(2048, 2048)",
                step="write both lists into padded buffers",
            ),
        ),
    ),
)
