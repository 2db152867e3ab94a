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
        "causal_conv",
        "compute_causal_conv1d_metadata",
        "Two prompts make four chunks; the programs behind them have nothing to do.",
        """\
>>> chunks, request, offset = compute_causal_conv1d_metadata(
...     torch.tensor([0, 8, 25], dtype=torch.int32)
... )
>>> request[:5].tolist(), offset[:5].tolist()
([0, 1, 1, 1, -1], [0, 0, 1, 2, -1])
>>> chunks[8]["nums"]
tensor([1, 3], dtype=torch.int32)
""",
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
                "There is room for twice 1,024 chunks, so most steps find the same buffers.",
                "(len(request), 2 * 1024)",
                "(2048, 2048)",
                step="write both lists into padded buffers",
            ),
        ),
    ),
)
