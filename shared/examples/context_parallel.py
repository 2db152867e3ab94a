"""The worked examples and the picture of context_parallel."""

from rich.text import Text

from .drawing import A, B, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    cells = [(f"p{p}", B if p // 2 % 2 else A) for p in range(7)]
    return [
        *said(
            "Seven positions dealt out to two ranks, two in a row (under the boxes the"
        ),
        *said("rank, then the place among what that rank keeps):", ""),
        *boxes(cells),
        under([str(p // 2 % 2) for p in range(7)]),
        under([str(p // 4 * 2 + p % 2) for p in range(7)]),
    ]


EXAMPLES = (
    Example(
        "context_parallel",
        "get_dcp_ranks",
        "Two positions for rank 0, two for rank 1, and again.",
        """\
>>> get_dcp_ranks(
...     torch.arange(8), dcp_world_size=2, dcp_kv_cache_interleave_size=2
... )
tensor([0, 0, 1, 1, 0, 0, 1, 1])
""",
        (
            StoryStep(
                "Position 5 is in pair 5 // 2 = 2, and pairs go to the ranks in turn.",
                "5 // 2 % 2",
                "0",
            ),
        ),
    ),
    Example(
        "context_parallel",
        "get_dcp_local_seq_lens",
        "Seven tokens on two ranks.",
        """\
>>> get_dcp_local_seq_lens(
...     torch.tensor([7], dtype=torch.int32),
...     dcp_world_size=2,
...     dcp_kv_cache_interleave_size=2,
... )
tensor([[4, 3]], dtype=torch.int32)
""",
        (
            StoryStep(
                "A round deals out 2 * 2 = 4 positions. One whole round gives each rank 2; of"
                " the 3 left, rank 0 gets 2 and rank 1 gets 1.",
                "[7 // 4 * 2 + min(7 % 4, 2), 7 // 4 * 2 + max(7 % 4 - 2, 0)]",
                "[4, 3]",
                step="deal the positions out and count each rank's",
            ),
            StoryStep(
                "Nobody asked for one rank, so both counts come back; they add up to 7.",
                "4 + 3",
                "7",
                step="keep the rank that was asked for",
            ),
        ),
    ),
)
