"""The worked examples and the picture of indexer_batch."""

from rich.text import Text

from .drawing import DIM, NEW, A, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    keys = [("0", A), ("1", A), ("2", A), ("0", NEW), ("1", NEW)]
    return [
        *said("Keys of two requests, one after the other:", ""),
        *boxes(keys),
        under(["k0", "k1", "k2", "k3", "k4"]),
        Text.assemble(("a row scores keys from ks to ke: ", DIM), ("0 to 2, 0 to 3, 3 to 5", A)),
    ]  # fmt: skip


EXAMPLES = (
    Example(
        "build_prefill_chunk_metadata",
        "Requests of 3 and 2 tokens, the last 2 and 1 of which are new.",
        (
            StoryStep(
                "One rank stores all keys, and each token is a key.",
                "[length // 1 for length in (3, 2)]",
                "[3, 2]",
                step="count the keys of each request, on each rank",
            ),
            StoryStep(
                "The keys of request 0 are 0 to 2, those of request 1 are 3 and 4.",
                "([0, 3, 3 + 2], [0] * 3 + [1] * 2)",
                "([0, 3, 5], [0, 0, 0, 1, 1])",
                step="place the keys of the requests one after the other",
            ),
            StoryStep(
                "Rows 0 and 1 are positions 1 and 2 of request 0, row 2 position 1 of request 1.",
                "[(0, 3 - 2), (0, 3 - 1), (1, 2 - 1)]",
                "[(0, 1), (0, 2), (1, 1)]",
                step="find the request and the position of each row of the slice",
            ),
            StoryStep(
                "A row scores its own key and those before it, counted from ks.",
                "[start + position + 1 for start, position in ((0, 1), (0, 2), (3, 1))]",
                "[2, 3, 5]",
                step="count the keys that are complete at the position of a row",
            ),
        ),
    ),
    Example(
        "balanced_prefill_row_shard",
        "Five rows of a prompt for two ranks.",
        (
            StoryStep(
                "The rows score 1 to 5 keys, together 1, 3, 6, 10 and 15.",
                "[sum(range(1, row + 2)) for row in range(5)]",
                "[1, 3, 6, 10, 15]",
                step="count the keys that the rows score",
            ),
            StoryStep(
                "The share of one rank is 15 / 2. Three rows score 6 keys, four would score 10.",
                "(15 / 2, sum(total <= 15 / 2 for total in (1, 3, 6, 10, 15)))",
                "(7.5, 3)",
                step="end each rank before the row that exceeds its share",
            ),
            StoryStep(
                "Both ranks have a row: rank 0 three, rank 1 the other two.",
                "[max(3, 1), 5 - max(3, 1)]",
                "[3, 2]",
                step="give each rank a row at least",
            ),
        ),
    ),
    Example(
        "prepare_uniform_decode",
        "Two drafted tokens for each of two requests, the second of which is padding.",
        (
            StoryStep(
                "The last token of request 0 attends to 5 keys, the one before it to 4.",
                "[max(length - later, 0) for length in (5, 0) for later in (1, 0)]",
                "[4, 5, 0, 0]",
                step="count the keys up to each token",
            ),
            StoryStep(
                "Two tokens have the row of request 0, two that of request 1.",
                "[row for row in ([7, 2], [0, 0]) for _ in range(2)]",
                "[[7, 2], [7, 2], [0, 0], [0, 0]]",
                step="repeat the rows of the requests",
            ),
        ),
    ),
)
