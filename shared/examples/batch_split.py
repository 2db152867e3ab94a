"""The worked examples and the picture of batch_split."""

from collections.abc import Sequence

from rich.text import Text

from .drawing import NEW, B, beside, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""

    def batch(order: Sequence[int]) -> list[Text]:
        tokens = [6, 1, 7, 1]
        cells = [(f"{tokens[each]}", NEW if tokens[each] == 1 else B) for each in order]
        requests = under([f"r{each}" for each in order], width=6)
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
        "batch_split",
        "reorder_batch_to_split_decodes_and_prefills",
        "One swap brings both decodes to the front.",
        """\
>>> reorder_batch_to_split_decodes_and_prefills([6, 1, 7, 1])
[3, 1, 2, 0]
""",
        (
            StoryStep(
                "Requests 1 and 3 bring one token each: two decodes, so the boundary lies"
                " before place 2.",
                "[count <= 1 for count in [6, 1, 7, 1]]",
                "[False, True, False, True]",
                step="count the decodes",
            ),
            StoryStep(
                "Of places 0 and 1, place 0 holds a prefill (6 tokens).",
                "[place for place in (0, 1) if [6, 1, 7, 1][place] > 1]",
                "[0]",
                step="find the prefills before the boundary",
            ),
            StoryStep(
                "Of places 2 and 3, place 3 holds a decode.",
                "[place for place in (3, 2) if [6, 1, 7, 1][place] <= 1]",
                "[3]",
                step="find the decodes behind it, the last one first",
            ),
            StoryStep(
                "They change places; requests 1 and 2 stand well and do not move.",
                "[[6, 1, 7, 1][request] for request in [3, 1, 2, 0]]",
                "[1, 1, 7, 6]",
                step="swap them pair by pair",
            ),
        ),
    ),
    Example(
        "batch_split",
        "split_decodes_and_prefills",
        "Two decodes, then two prefills with ten tokens together.",
        """\
>>> split_decodes_and_prefills(build_common_attn_metadata(
...     query_lens=[1, 1, 7, 3],
...     num_computed_tokens=[5, 5, 5, 5],
...     block_rows=[[1], [2], [3], [4]],
...     block_size=16,
... ))
(2, 2, 2, 10)
""",
        (
            StoryStep(
                "The first request with more than one new token is number 2, which brings 7."
                " Two decodes stand before it.",
                "[count > 1 for count in [1, 1, 7, 3]].index(True)",
                "2",
                step="find the first request that is no decode",
            ),
            StoryStep(
                "The two decodes bring 2 tokens, the two prefills the other 10: tokens 0 and 1"
                " of the flat batch, and tokens 2 to 11.",
                "(1 + 1, 7 + 3)",
                "(2, 10)",
                step="count the tokens on both sides",
            ),
        ),
    ),
)
