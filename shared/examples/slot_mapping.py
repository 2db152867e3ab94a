"""The worked examples and the picture of slot_mapping."""

from rich.text import Text

from .drawing import DIM, NEW, A, beside, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    row, block_size, first_new = [7, 2, 5], 4, 4
    columns = []
    for entry, block in enumerate(row):
        cells, slots = [], []
        for offset in range(block_size):
            position = entry * block_size + offset
            stored = NEW if position >= first_new else A
            cells.append((f"p{position}", stored) if position < 10 else ("", DIM))
            slots.append(str(block * block_size + offset))
        title = Text(f"entry {entry}: block {block}", style=A)
        columns.append([title, *boxes(cells), under(slots)])
    return [
        *said(
            "The row 7, 2, 5 of one sequence. In the boxes its positions; under them"
        ),
        *said("the slots they get. Positions 4 to 9 are stored in this step:", ""),
        *beside(*columns),
    ]


EXAMPLES = (
    Example(
        "compute_slot_mapping",
        "Seven new tokens of one sequence; the first one needs no slot.",
        (
            StoryStep(
                "3 of 10 tokens are in the cache, so positions 3 to 9 are new. Position 3 is"
                " before start_idx = 4: it is not stored, and its slot is -1.",
                "list(range(3, 10))",
                "[3, 4, 5, 6, 7, 8, 9]",
            ),
            StoryStep(
                "Position 5 belongs to entry 5 // 4 = 1 of the row 7, 2, 5: block 2.",
                "[7, 2, 5][5 // 4]",
                "2",
                step="look up the block",
            ),
            StoryStep(
                "Block 2 starts at slot 2 * 4 = 8, and position 5 is number 5 % 4 = 1 in it:"
                " slot 9.",
                "2 * 4 + 5 % 4",
                "9",
                step="add the offset in the block",
            ),
            StoryStep(
                "Positions 4 to 7 fill block 2, slots 8 to 11. Position 8 begins the next"
                " entry, block 5, whose first slot is 20: addresses jump where blocks do.",
                "[5 * 4 + position % 4 for position in (8, 9)]",
                "[20, 21]",
            ),
        ),
    ),
    Example(
        "compute_slot_mapping_batch",
        "One request has its fifth token, another starts with three.",
        (
            StoryStep(
                "Request 0 has 4 tokens in the cache, so its new one has position 4: entry 1"
                " of its row, block 2, first slot.",
                "[7, 2][4 // 4] * 4 + 4 % 4",
                "8",
            ),
            StoryStep(
                "Request 1 has none; its new positions are 0, 1 and 2, all in block 5.",
                "[5 * 4 + position for position in (0, 1, 2)]",
                "[20, 21, 22]",
            ),
            StoryStep(
                "Request after request, the slots of a batch make one flat list.",
                "[8] + [20, 21, 22]",
                "[8, 20, 21, 22]",
            ),
        ),
    ),
    Example(
        "compute_slot_mapping_device",
        "The same batch, from tensors, padded to five tokens.",
        (
            StoryStep(
                "The starts 0, 1, 4 say that token 0 belongs to request 0 and tokens 1 to 3 to"
                " request 1: one new token and three.",
                "[1 - 0, 4 - 1]",
                "[1, 3]",
            ),
            StoryStep(
                "Token 2 is the second new token of request 1, so its position is 0 + 2 - 1 ="
                " 1, its block the first of row 1, its slot 21.",
                "[5, 0][1 // 4] * 4 + 1 % 4",
                "21",
            ),
            StoryStep(
                "A captured CUDA graph always runs the same number of tokens, here 5. The one"
                " that no request owns is not stored.",
                "5 - 4",
                "1",
            ),
        ),
    ),
    Example(
        "compute_slot_mapping_start_idx",
        "With a window of 8, the first two tokens of a prompt of 10 are never read again.",
        (
            StoryStep(
                "4 tokens are in the cache and 6 are new: the sequence has 10.",
                "4 + 6",
                "10",
            ),
            StoryStep(
                "The next token attends to 8 keys, its own included; of these 10 tokens that is"
                " at most the last 8, which begin at position 2.",
                "10 - 8",
                "2",
            ),
            StoryStep(
                "A sequence shorter than its window would give a negative number; its first"
                " position is then 0.",
                "max(0, 5 - 8)",
                "0",
            ),
        ),
    ),
)
