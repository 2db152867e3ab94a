"""The worked examples and the picture of tensor_parallel."""

from rich.text import Text

from .drawing import A, B, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    cells = [(f"q{head}", B if head // 4 else A) for head in range(8)]
    return [
        *said(
            "Eight query heads on four ranks. Under them the rank, and the KV head that"
        ),
        *said("they read:", ""),
        *boxes(cells),
        under([str(head // 2) for head in range(8)]),
        under([str(head // 4) for head in range(8)]),
        *said("", "Ranks 0 and 1 both store KV head 0, ranks 2 and 3 KV head 1."),
    ]


EXAMPLES = (
    Example(
        "get_tp_heads",
        "The heads of the last of four ranks.",
        (
            StoryStep(
                "Each rank has two query heads; rank 3 has the last two.",
                "(3 * (8 // 4), 4 * (8 // 4))",
                "(6, 8)",
                step="give each rank consecutive query heads",
            ),
            StoryStep(
                "Four query heads read each KV head, so two ranks need it: heads 6 and 7 read"
                " KV head 1.",
                "[head * 2 // 8 for head in (6, 7)]",
                "[1, 1]",
                step="give it the KV heads that these read",
            ),
        ),
    ),
    Example(
        "get_dcp_groups",
        "Eight ranks, of which four store the same KV head, in groups of two.",
        (
            StoryStep(
                "Ranks 0 to 3 store KV head 0. In groups of two, each pair shares its keys.",
                "8 // 2 // 2",
                "2",
                step="put consecutive ranks into one group",
            ),
        ),
    ),
)
