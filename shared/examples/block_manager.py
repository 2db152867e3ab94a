"""The worked example and the picture of block_manager."""

from rich.text import Text

from .drawing import DIM, NEW, A, B, beside, boxes, said
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""

    def row(title: str, *cells: tuple[str, str]) -> list[Text]:
        return [Text(title, style=DIM), *boxes(cells)]

    shared = ("0", A), ("1", A)
    return [
        *said("Blocks 0 and 1 hold the same 4 tokens for all three requests:", ""),
        *beside(
            row("request a", *shared, ("2", A)),
            row("request b: prefix hit", *shared, ("3", B)),
            row("request c: fork of a", *shared, ("2", A)),
            row("c writes", *shared, ("4", NEW)),
        ),
        *said("", "c must not write to block 2, which a holds: copy 2 to 4."),
    ]


EXAMPLES = (
    Example(
        "BlockManager",
        "Three requests begin with the same four tokens and share two blocks.",
        (
            StoryStep(
                "Request b has 6 tokens. The last one is always computed, so the first"
                " 5 // 2 = 2 full blocks are looked up, and both are known from a.",
                "(6 - 1) // 2",
                "2",
                step="look up the full blocks of all tokens but the last one",
            ),
            StoryStep(
                "Request c has 5 computed tokens, so its next one goes to entry 5 // 2 = 2 of"
                " its row. That is block 2, which a holds too.",
                "[0, 1, 2][5 // 2]",
                "2",
                step="find the blocks that may not be written, and how many more are needed",
            ),
            StoryStep(
                "Blocks 0 and 1 count one more request each when b takes them. After the fork"
                " three requests hold them.",
                "[0, 1, 2].count(0) + [0, 1, 3].count(0) + [0, 1, 4].count(0)",
                "3",
                step="take the computed blocks",
            ),
            StoryStep(
                "Block 2 starts at position 4, before c's new token at position 5. So its"
                " content is needed and has to be copied to block 4.",
                "2 * 2 < 5",
                "True",
                step="replace what may not be written; copy a block that is partly computed",
            ),
            StoryStep(
                "Request b needs 3 blocks for 4 + 2 tokens and found 2, so it gets one more.",
                "-(-(4 + 2) // 2) - 2",
                "1",
                step="append the blocks that are missing",
            ),
            StoryStep(
                "Of the 5 tokens of a, 4 fill blocks. Block 1 is known as the tokens 7, 9"
                " after block 0's 7, 8; block 2 is not full and stays unknown.",
                "[[7, 8, 7, 9, 7][2 * index : 2 * index + 2] for index in range(5 // 2)]",
                "[[7, 8], [7, 9]]",
                step="enter each full block after the one before it",
            ),
            StoryStep(
                "The fork costs no block: c gets the same row as a.",
                "[0, 1, 2] + []",
                "[0, 1, 2]",
                step="share every block, the last one too; the first request that writes to it"
                " gets a copy",
            ),
            StoryStep(
                "Request a is freed last. Block 2 becomes free, and blocks 1 and 0 become"
                " cached, in that order: block 1 is useless without block 0.",
                "[0, 1, 2][::-1]",
                "[2, 1, 0]",
                step="release the last block first, so that it is evicted first",
            ),
            StoryStep(
                "Request d needs 8 / 2 = 4 blocks and 3 are free, so block 1 loses its content."
                " Block 0 is still known.",
                "8 // 2 - 3",
                "1",
                step="evict the cached block that was released longest ago",
            ),
        ),
    ),
)
