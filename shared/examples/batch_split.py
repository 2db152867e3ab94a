"""The worked examples and the picture of batch_split."""

from collections.abc import Sequence

from rich.text import Text

from .drawing import NEW, B, beside, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""

    def batch(order: Sequence[int]) -> list[Text]:
        tokens = [6, 1, 7, 1]
        cells = [
            (f"{tokens[index]}", NEW if tokens[index] == 1 else B) for index in order
        ]
        requests = under([f"r{index}" for index in order], width=6)
        return [*boxes(cells, width=6), requests]

    return [
        *said(
            "New tokens of requests r0 to r3, as they came and with decodes first:", ""
        ),
        *beside(
            batch([0, 1, 2, 3]),
            [Text(), Text("one swap ->"), Text(), Text()],
            batch([3, 1, 2, 0]),
        ),
        *said(" " * 45 + "decodes".center(13) + "|" + "prefills".center(13)),
    ]


EXAMPLES = (
    Example(
        "reorder_batch_to_split_decodes_and_prefills",
        "One swap moves both decodes to the front; more regions need the computed tokens.",
        (
            StoryStep(
                "Requests 1 and 3 have one new token each, so they are decodes: region 0. The"
                " others are prefills: region 1.",
                "[int(count > 1) for count in [6, 1, 7, 1]]",
                "[1, 0, 1, 0]",
                step="assign each request to a region",
            ),
            StoryStep(
                "In order the regions would be 0, 0, 1, 1. Places 0 and 3 hold another one;"
                " requests 1 and 2 are in their region and do not move.",
                "[place for place in range(4) if [1, 0, 1, 0][place] != [0, 0, 1, 1][place]]",
                "[0, 3]",
                step="find the positions with a request of another region",
            ),
            StoryStep(
                "The decode of the two takes the first of the places, the prefill the other:"
                " a swap.",
                "[[6, 1, 7, 1][request] for request in [3, 1, 2, 0]]",
                "[1, 1, 7, 6]",
                step="fill these positions region by region",
            ),
            StoryStep(
                "In the last call request 3 has one new token but nothing in the cache: its"
                " prompt is one token long. With four regions it is a prefill, region 3, and"
                " comes last.",
                "[3 if old == 0 else 2 * (new > 1) for new, old in"
                " zip([6, 1, 7, 1], [0, 5, 8, 0])]",
                "[3, 0, 2, 3]",
            ),
        ),
    ),
    Example(
        "split_decodes_and_prefills",
        "Two decodes, then two prefills with ten tokens together.",
        (
            StoryStep(
                "The first request with more than one new token is request 2, which has 7."
                " Two decodes come before it.",
                "[count > 1 for count in [1, 1, 7, 3]].index(True)",
                "2",
                step="find the first request that is not a decode",
            ),
            StoryStep(
                "The two decodes have 2 tokens, the two prefills the other 10: tokens 0 and"
                " 1 of the flat batch, and tokens 2 to 11.",
                "(1 + 1, 7 + 3)",
                "(2, 10)",
                step="count the tokens of decodes and prefills",
            ),
        ),
    ),
    Example(
        "split_decodes_prefills_and_extends",
        "Two decodes, an extend of four tokens, a prefill of six.",
        (
            StoryStep(
                "Request 2 is the first with more than one new token.",
                "[count > 1 for count in [1, 1, 4, 6]].index(True)",
                "2",
                step="find the first request that is not a decode",
            ),
            StoryStep(
                "It has eight tokens in the cache, so its sequence of 12 is longer than its 4"
                " new tokens: an extend. Request 3 has none: its sequence is its 6 new"
                " tokens.",
                "[new == seq for new, seq in ((4, 12), (6, 6))]",
                "[False, True]",
                step="find the first of them without cached tokens",
            ),
            StoryStep(
                "So the regions begin at tokens 0, 2 and 6 of the flat batch, which ends at"
                " 12.",
                "(2 - 0, 6 - 2, 12 - 6)",
                "(2, 4, 6)",
                step="count the tokens of each region",
            ),
        ),
    ),
    Example(
        "split_prefill_chunks",
        "Sequences of 6, 5 and 2 tokens, and a workspace for ten.",
        (
            StoryStep(
                "6 and 5 are 11, one more than fits, so the first chunk ends before request 1."
                " 5 and 2 are 7 and stay together.",
                "(6 + 5 > 10, 5 + 2 > 10)",
                "(True, False)",
                step="end a chunk before the sequence that does not fit",
            ),
            StoryStep(
                "The chunks begin at requests 0 and 1, and the last one ends at 3.",
                "list(zip([0, 1], [1, 3]))",
                "[(0, 1), (1, 3)]",
                step="pair the bounds of each chunk",
            ),
        ),
    ),
)
