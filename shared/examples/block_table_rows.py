"""The worked examples and the picture of block_table_rows."""

from rich.text import Text

from .drawing import DIM, NEW, A, B, beside, boxes, said
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""

    def table(title: str, *rows: list[tuple[str, str]]) -> list[Text]:
        lines = [Text(title, style=DIM)]
        for row in rows:
            lines += boxes(row)
        return lines

    empty = ("0", DIM)
    return [
        *said(
            "Request r1 gets a block; then r0 ends and r1's row moves into the gap:", ""
        ),
        *beside(
            table(
                "r0, r1 start",
                [("7", A), ("2", A), ("4", A)],
                [("5", B), empty, empty],
            ),
            table(
                "append_row",
                [("7", A), ("2", A), ("4", A)],
                [("5", B), ("9", NEW), empty],
            ),
            table(
                "move_row(1, 0)",
                [("5", B), ("9", B), empty],
                [("5", DIM), ("9", DIM), empty],
            ),
        ),
    ]


EXAMPLES = (
    Example(
        "BlockTable",
        "Two requests start, one grows, the other ends.",
        (
            StoryStep(
                "Block 9 is one entry, as the kernel's blocks are the manager's. For a kernel"
                " with blocks of 2 it would be two, of its first and its second half.",
                "[9 * 2 + entry for entry in range(2)]",
                "[18, 19]",
                step="write one entry per kernel block",
            ),
            StoryStep(
                "Position 4 of row 1 belongs to entry 4 // 4 = 1: block 9.",
                "[5, 9][4 // 4]",
                "9",
                step="look up the block",
            ),
            StoryStep(
                "It is the first slot of that block. With two ranks every other position would"
                " be another rank's, and get slot -1 here.",
                "9 * 4 + 4 % 4",
                "36",
                step="add the offset among this rank's tokens",
            ),
        ),
    ),
    Example(
        "mamba_get_block_table_tensor",
        "Of each row, only the block with the last state is needed.",
        (
            StoryStep(
                "The last tokens have positions 4 and 8, in entries 1 and 2.",
                "[(5 - 1) // 4, (9 - 1) // 4]",
                "[1, 2]",
                step="find the block of the last token",
            ),
            StoryStep(
                "Without draft tokens one block per request is enough.",
                "[[7, 2, 0][1], [5, 9, 4][2]]",
                "[2, 4]",
                step="select it and the blocks of the draft tokens",
            ),
        ),
    ),
)
