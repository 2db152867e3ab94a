"""The worked examples and the picture of local_attention."""

from rich.text import Text

from .drawing import DIM, NEW, A, beside, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""

    def piece(begin: int, end: int, title: str) -> list[Text]:
        cells = [(f"p{p}", NEW if p >= 2 else A) for p in range(begin, end)]
        cells += [("", DIM)] * (4 - len(cells))
        keys = [str(place) for place in range(end - begin)]
        keys += [""] * (4 - len(keys))
        return [Text(title, style=A), *boxes(cells), under(keys)]

    return [
        *said(
            "Six tokens in chunks of 4; positions 2 to 5 are new. Each chunk becomes"
        ),
        *said("a virtual request, whose keys count from 0 (under the boxes):", ""),
        *beside(
            piece(0, 4, "virtual 0: blocks 7, 2"), piece(4, 6, "virtual 1: block 5")
        ),
    ]


EXAMPLES = (
    Example(
        "make_local_attention_virtual_batches",
        "Four new tokens are in two chunks, so they become two requests.",
        (
            StoryStep(
                "Positions 2 to 5 are new. They are in chunks 2 // 4 = 0 to 5 // 4 = 1.",
                "sorted({position // 4 for position in range(2, 6)})",
                "[0, 1]",
                step="find the chunks that hold new tokens",
            ),
            StoryStep(
                "Chunk 0 has the new tokens 2 and 3 and four keys; chunk 1 has the new tokens"
                " 4 and 5, which are its only keys.",
                "[(4 - max(0, 2), 4 - 0), (6 - max(4, 2), 6 - 4)]",
                "[(2, 4), (2, 2)]",
                step="count each chunk's new tokens and keys",
            ),
            StoryStep(
                "A chunk has 4 // 2 = 2 blocks. Chunk 0 has entries 0 and 1; chunk 1 has entry 2"
                " and one past the row, which is never read and names the last block again.",
                "[[7, 2, 5][min(entry, 2)] for entry in (2, 3)]",
                "[5, 5]",
                step="copy the chunk's blocks from the row",
            ),
            StoryStep(
                "Query 2 is the last but one of 2 new tokens on 4 keys, so it attends to positions"
                " 0 to 2; query 4 is the first of its chunk and attends to itself alone.",
                "[4 - 2 + 1, 2 - 2 + 1]",
                "[3, 1]",
                step="copy the virtual requests to the device",
            ),
        ),
    ),
)
