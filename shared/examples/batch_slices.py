"""The worked examples and the picture of batch_slices."""

from rich.text import Text

from .drawing import A, B, beside, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    first = [("r0", A), ("r0", A)]
    second = [("r0", A), ("r1", B)]
    return [
        *said("Four new tokens, cut behind the second. The cut falls inside r0:", ""),
        *beside(
            [Text(), Text("micro-batch 0"), Text(), Text("position")],
            [*boxes(first), under(["0", "1"])],
            [Text(), Text("micro-batch 1"), Text(), Text("position")],
            [*boxes(second), under(["2", "4"])],
        ),
        *said(
            "",
            "query_start_loc  0, 2                      0, 1, 2",
            "seq_lens         2 (r0 ends early)         3, 5",
            "computed         0                         2 (what ran before), 4",
        ),
    ]


EXAMPLES = (
    Example(
        "batch_slices",
        "slice_query_start_locs",
        "Requests 1 and 2 of three, with starts of their own.",
        """\
>>> slice_query_start_locs(
...     torch.tensor([0, 3, 7, 12], dtype=torch.int32), slice(1, 3)
... )
tensor([0, 4, 9], dtype=torch.int32)
""",
        (
            StoryStep(
                "Requests 1 and 2 start at tokens 3 and 7 and end at 12.",
                "[0, 3, 7, 12][1 : 3 + 1]",
                "[3, 7, 12]",
                step="slice the starts and the last end",
            ),
            StoryStep(
                "Counted from token 3 on they start at 0 and 4 and end at 9.",
                "[start - 3 for start in (3, 7, 12)]",
                "[0, 4, 9]",
                step="subtract the first start",
            ),
        ),
    ),
    Example(
        "batch_slices",
        "make_metadata_with_slice",
        "Four tokens from the middle of a request of ten.",
        """\
>>> step = build_common_attn_metadata(
...     query_lens=[10],
...     num_computed_tokens=[8],
...     block_rows=[[7, 2]],
...     block_size=16,
... )
>>> part = make_metadata_with_slice(
...     UBatchSlice(slice(0, 1), slice(2, 6)), step
... )
>>> part.query_start_loc, part.seq_lens
(tensor([0, 4], dtype=torch.int32), tensor([14], dtype=torch.int32))
>>> part.num_computed_tokens_cpu
tensor([10], dtype=torch.int32)
>>> part.slot_mapping
tensor([122, 123, 124, 125])
""",
        (
            StoryStep(
                "Tokens 2 to 5 have positions 10 to 13, which lie in block 7 at slots 122 to"
                " 125.",
                "[7 * 16 + 8 + token for token in range(2, 6)]",
                "[122, 123, 124, 125]",
                step="slice the fields that have an entry per request or token",
            ),
            StoryStep(
                "Of the request's tokens 0 to 9 the slice keeps 4; it leaves out 2 in front"
                " and 4 behind.",
                "(2 - 0, 10 - 6)",
                "(2, 4)",
                step="clip each request to the token slice",
            ),
            StoryStep(
                "Without the 4 behind, the sequence has 18 - 4 tokens. The 2 in front are"
                " computed by then: 8 + 2.",
                "(18 - 4, 8 + 2)",
                "(14, 10)",
                step="shorten requests cut at the end, advance requests cut at the front",
            ),
            StoryStep(
                "No logits were asked for, so there are none to share out.",
                "step.logits_indices_padded is None",
                "True",
                step="select the tokens whose logits are wanted",
            ),
        ),
    ),
    Example(
        "batch_slices",
        "split_attn_metadata",
        "Two micro-batches whose cut falls inside a request.",
        """\
>>> step = build_common_attn_metadata(
...     query_lens=[3, 1],
...     num_computed_tokens=[0, 4],
...     block_rows=[[5], [7, 2]],
...     block_size=4,
... )
>>> halves = split_attn_metadata(
...     [
...         UBatchSlice(slice(0, 1), slice(0, 2)),
...         UBatchSlice(slice(0, 2), slice(2, 4)),
...     ],
...     step,
... )
>>> [half.query_start_loc_cpu.tolist() for half in halves]
[[0, 2], [0, 1, 2]]
>>> [half.seq_lens_cpu.tolist() for half in halves]
[[2], [3, 5]]
""",
        (
            StoryStep(
                "The first micro-batch has two tokens of request 0, whose sequence ends there"
                " for now.",
                "halves[0].num_computed_tokens_cpu.tolist()",
                "[0]",
            ),
            StoryStep(
                "The second has the third token of request 0, with two computed before it,"
                " and the token of request 1.",
                "halves[1].num_computed_tokens_cpu.tolist()",
                "[2, 4]",
            ),
        ),
    ),
)
