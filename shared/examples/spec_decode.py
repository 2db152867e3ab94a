"""The worked examples and the picture of spec_decode."""

from rich.text import Text

from .drawing import A, B, beside, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    flat = boxes([("q0", A), ("q1", A), ("q2", B), ("q3", B)])
    one, two = boxes([("q0", A), ("q1", A)]), boxes([("q2", B), ("q3", B)])
    return [
        *said("Four queries of two requests, one after another, and by request:", ""),
        *beside(
            [*flat, under(["0", "1", "2", "3"])],
            [Text(), Text("same memory"), Text(), Text()],
            [*one, under(["0,0", "0,1"])],
            [*two, under(["1,0", "1,1"])],
        ),
    ]


EXAMPLES = (
    Example(
        "reshape_query_for_spec_decode",
        "Four tokens of two requests get an axis for the request.",
        (
            StoryStep("Each request has 4 / 2 = 2 tokens.", "4 // 2", "2"),
            StoryStep(
                "Nothing is copied: the new tensor begins at the same address.",
                "reshape_query_for_spec_decode(query, 2).data_ptr() == query.data_ptr()",
                "True",
            ),
        ),
    ),
    Example(
        "reshape_attn_output_for_spec_decode",
        "And back to one row a token.",
        (
            StoryStep(
                "Token 1 of request 1 is row 1 * 2 + 1 = 3 of the flat output.",
                "1 * 2 + 1",
                "3",
            ),
        ),
    ),
)
