"""The worked examples and the picture of draft_steps."""

from rich.text import Text

from .drawing import DIM, NEW, A, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    cells = [("t3", A), ("d4", A), ("d5", NEW), ("d6", NEW)]
    marks = ["", "goes on", "rejected", "rejected"]
    return [
        *said("One request, three drafts. The first is accepted:", ""),
        *boxes(cells),
        Text.assemble(("the row from which the draft model goes on:", DIM)),
        under(marks),
    ]


EXAMPLES = (
    Example(
        "eagle_prepare_next_token_padded",
        "Three tokens at most were sampled for each of two requests.",
        (
            StoryStep(
                "Request 0 has two valid tokens, request 1 none.",
                "[[t for t in row if t >= 0] for row in ([8, 5, -1], [-1, -1, -1])]",
                "[[8, 5], []]",
                step="select the valid tokens",
            ),
            StoryStep(
                "Request 0 goes on from its last one, request 1 from its backup.",
                "tokens.tolist()",
                "[5, 2]",
                step="take the last one, or the backup",
            ),
        ),
    ),
    Example(
        "eagle_prepare_inputs_padded",
        "Two requests with a token and three drafts each.",
        (
            StoryStep(
                "One token more than the accepted drafts is sampled.",
                "[3 + 1 - valid for valid in (4, 1)]",
                "[0, 3]",
                step="count the rejected drafts",
            ),
            StoryStep(
                "The last rows are 3 and 7; that of request 1 is three earlier.",
                "[3 - 0, 7 - 3]",
                "[3, 4]",
                step="go back from the request's last row",
            ),
        ),
    ),
    Example(
        "eagle_step_update_slot_mapping_and_metadata",
        "Two requests; the second is at the end of the model's range.",
        (
            StoryStep(
                "The model has positions 0 to 15.",
                "[0 if p + 1 >= 16 else p + 1 for p in (4, 15)]",
                "[5, 0]",
                step="take the next position, or start again",
            ),
            StoryStep(
                "Position 5 has offset 1 in entry 1 of the row, block 2.",
                "2 * 4 + 5 % 4",
                "9",
                step="look its slot up",
            ),
            StoryStep(
                "Request 1 has one key from now on, that of its token.",
                "lens.tolist()",
                "[6, 1]",
                step="count its key",
            ),
        ),
    ),
    Example(
        "compute_token_to_req_indices",
        "Three requests, of which the first has no token, and a row of padding.",
        (
            StoryStep(
                "The requests end at 0, 2 and 3.",
                "[min(r for r, end in enumerate([0, 2, 3]) if t < end) for t in range(3)]",
                "[1, 1, 2]",
                step="find the first request that ends after the token",
            ),
        ),
    ),
)
