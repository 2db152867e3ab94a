"""The worked examples and the picture of batch_slices."""

from rich.text import Text

from .drawing import A, B, beside, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    first = [("r0", A), ("r0", A)]
    second = [("r0", A), ("r1", B)]
    return [
        *said("Four new tokens, cut after the second. The cut is inside r0:", ""),
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
        "slice_query_start_locs",
        "Requests 1 and 2 of three, with starts of their own.",
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
        "make_metadata_with_slice",
        "Four tokens from the middle of a request of ten.",
        (
            StoryStep(
                "Tokens 2 to 5 have positions 10 to 13, which are in block 7 at slots 122 to"
                " 125.",
                "[7 * 16 + 8 + token for token in range(2, 6)]",
                "[122, 123, 124, 125]",
                step="slice the fields that have an entry per request or token",
            ),
            StoryStep(
                "Of the request's tokens 0 to 9 the slice has 4; it excludes 2 before it"
                " and 4 after it.",
                "(2 - 0, 10 - 6)",
                "(2, 4)",
                step="clip each request to the token slice",
            ),
            StoryStep(
                "Without the 4 after it, the sequence has 18 - 4 tokens. The 2 before it are"
                " computed by then: 8 + 2.",
                "(18 - 4, 8 + 2)",
                "(14, 10)",
                step="shorten requests cut at the end, advance requests cut at the front",
            ),
            StoryStep(
                "No logits are wanted, so there are none to select.",
                "step.logits_indices_padded is None",
                "True",
                step="select the tokens whose logits are wanted",
            ),
        ),
    ),
    Example(
        "split_attn_metadata",
        "Two micro-batches with a cut inside a request.",
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
