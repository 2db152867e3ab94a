"""The worked examples and the picture of sparse_slots."""

from rich.text import Text

from .drawing import DIM, NEW, A, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    tokens = [(f"p{position}", A if position % 2 else DIM) for position in range(5)]
    return [
        *said("Two tokens per state; the last token of a group writes it:", ""),
        *boxes(tokens),
        under(["", "s0", "", "s1", ""]),
        *said("", "A ring of two slots, after position 5:", ""),
        *boxes([("p4", NEW), ("p5", NEW)]),
    ]


EXAMPLES = (
    Example(
        "get_compressed_slot_mapping",
        "Tokens 1 to 4 of a sequence are new; a state has two tokens, a block one state.",
        (
            StoryStep(
                "One rank stores all tokens, so a position is its own.",
                "[position // 1 // 1 * 1 for position in range(1, 5)]",
                "[1, 2, 3, 4]",
                step="find the position among those that this rank stores",
            ),
            StoryStep(
                "Positions 1 and 3 are the last of their groups of two.",
                "[position for position in range(1, 5) if (position + 1) % 2 == 0]",
                "[1, 3]",
                step="skip tokens that complete no group here",
            ),
            StoryStep(
                "They complete states 0 and 1. Blocks 7 and 2 have one state each.",
                "[[7, 2][position // 2] * 1 for position in (1, 3)]",
                "[7, 2]",
                step="look up the slot of the group's state",
            ),
        ),
    ),
    Example(
        "compute_swa_indices_and_lens",
        "Positions 3 and 4 are new. Position 3 ends an image that starts at position 1.",
        (
            StoryStep(
                "A window of two: the token and the one before it.",
                "[(position - 2 + 1, position) for position in (3, 4)]",
                "[(2, 3), (3, 4)]",
                step="find the first and the last key of the window",
            ),
            StoryStep(
                "Position 3 attends to its image from position 1 on. Position 4 is in no image.",
                "(min(2, max(1, 3 - 3 + 1)), max(3, min(3, 3 + 3)))",
                "(1, 3)",
                step="add the keys of the token's image",
            ),
            StoryStep(
                "All five keys are stored, so three and two are left.",
                "[[*range(max(first, 0), min(last + 1, 5))] for first, last in ((1, 3), (3, 4))]",
                "[[1, 2, 3], [3, 4]]",
                step="leave out keys that are not stored",
            ),
            StoryStep(
                "Positions 1 to 3 are in block 7, position 4 starts block 2.",
                "[[[7, 2][p // 4] * 4 + p % 4 for p in keys] for keys in ([1, 2, 3], [3, 4])]",
                "[[29, 30, 31], [31, 8]]",
                step="look up their slots in the request's row",
            ),
        ),
    ),
    Example(
        "compute_kpool_tail_slot_mapping",
        "Positions 3 to 5 are new. The ring, block 7, has two slots.",
        (
            StoryStep(
                "A ring of two keeps the last two of three tokens.",
                "[position for position in (3, 4, 5) if 6 - position <= 2]",
                "[4, 5]",
                step="skip tokens without a ring, and those that are overwritten in this step",
            ),
            StoryStep(
                "Position 4 has slot 0 of the block, position 5 slot 1.",
                "[7 * 2 + position % 2 for position in (4, 5)]",
                "[14, 15]",
                step="wrap the position at the end of the ring",
            ),
        ),
    ),
)
