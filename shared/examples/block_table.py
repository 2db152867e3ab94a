"""The worked examples and the picture of block_table."""

from rich.text import Text

from .drawing import DIM, A, B, beside, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    rows = beside(
        [Text(), Text("request 0"), Text(), Text()],
        [*boxes([("7", A), ("2", A), ("", DIM)]), under(["0-3", "4-7", ""])],
        [Text(), Text("request 1"), Text(), Text()],
        [*boxes([("5", B), ("", DIM), ("", DIM)]), under(["0-3", "", ""])],
    )
    owners = {7: ("r0", A, "0-3"), 2: ("r0", A, "4-7"), 5: ("r1", B, "0-3")}
    found = [owners.get(block, ("", DIM, "")) for block in range(8)]
    cache = beside(
        [Text(line) for line in ("block", "", "the cache", "", "positions")],
        [
            under([str(block) for block in range(8)]),
            *boxes([(owner, style) for owner, style, _ in found]),
            under([positions for _, _, positions in found]),
        ],
    )
    return [
        *said(
            "Each request's row lists its blocks; under them, the positions they hold:"
        ),
        *rows,
        *said("", "The same blocks in the cache:", ""),
        *cache,
    ]


EXAMPLES = (
    Example(
        "blocks_needed",
        "Nine tokens in blocks of four need three blocks, the last one almost empty.",
        (
            StoryStep(
                "Eight tokens fill two blocks of four to the last slot.",
                "9 // 4",
                "2",
            ),
            StoryStep(
                "One token is left over. It needs a whole block, as blocks are never split.",
                "9 % 4",
                "1",
            ),
            StoryStep(
                "The result is 9 / 4 rounded up. Minus signs around // round up without floats.",
                "-(-9 // 4)",
                "3",
            ),
        ),
    ),
    Example(
        "make_block_table",
        "Two requests, one with two blocks and one with one, become one table.",
        (
            StoryStep(
                "Request 0 has blocks 7 and 2, in this order: its first tokens are in block"
                " 7, although 7 is the larger number.",
                "[[7, 2], [5]][0]",
                "[7, 2]",
            ),
            StoryStep(
                "Request 1 has one block, 5.",
                "[[7, 2], [5]][1]",
                "[5]",
            ),
            StoryStep(
                "The table is 3 wide, so row 0 has 1 padding entry and row 1 has 2."
                " They are 0 here. Any value is allowed, since they are never read.",
                "[3 - len(row) for row in [[7, 2], [5]]]",
                "[1, 2]",
            ),
        ),
    ),
    Example(
        "append_blocks",
        "Request 0 needs more than its two blocks and gets a third.",
        (
            StoryStep(
                "Row 0 holds 2 blocks, so the new block 4 goes to entry 2, after"
                " them. The row is then 7, 2, 4.",
                "[7, 2] + [4]",
                "[7, 2, 4]",
            ),
            StoryStep(
                "Request 1 needs no block: its list is empty and its row does not change.",
                "[5] + []",
                "[5]",
            ),
            StoryStep(
                "The result is the number of blocks per row. It does not follow from the"
                " table: a 0 in it may be padding or block 0.",
                "[2 + len([4]), 1 + len([])]",
                "[3, 1]",
            ),
        ),
    ),
)
