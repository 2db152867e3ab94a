"""The worked example and the picture of cascade_attention."""

from rich.text import Text

from .drawing import NEW, A, B, beside, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    columns = beside(
        [*boxes([("4", NEW), ("5", NEW)]), under(["block 2"], 9)],
        [*boxes([("0", A)], 7), under(["block 0"], 7)],
        [*boxes([("2", B)], 7), under(["block 1"], 7)],
        gap=8,
    )
    return [
        *said(
            "Both requests begin with block 2: it is read once, by both queries. Then each",
            "reads its own:",
            "",
        ),
        *columns,
        *said(
            "", "4.5 weighs 2, the own value 1: 3 for request 0, 3.6667 for request 1."
        ),
    ]


EXAMPLES = (
    Example(
        "use_cascade_attention",
        "The cascade is used if it takes fewer rounds of key tiles.",
        (
            StoryStep(
                "A prefix of 512 keys has 4 tiles of 128. The cascade runs 8 programs, one per"
                " query head: 2 waves on 4 SMs, each of 4 tiles.",
                "8 // 4 * 4",
                "8",
            ),
            StoryStep(
                "Split-KV reads the 4 tiles for each of 16 requests and 2 KV heads, evenly"
                " distributed over 4 SMs. 8 is less than 32.",
                "16 * 2 * 4 // 4",
                "32",
            ),
        ),
    ),
    Example(
        "cascade_attention",
        "Two requests read their common block once, then each its own.",
        (
            StoryStep(
                "The first 2 keys are in block 2, for both. All keys are 1, so both queries get"
                " the mean of 4 and 5; the scores 1 and 1 leave the log-sum-exp 1.6931.",
                "((4 + 5) / 2, round(math.log(2 * math.e), 4))",
                "(4.5, 1.6931)",
                step="attend to the shared prefix, all queries as one request",
            ),
            StoryStep(
                "Without the prefix each sequence is 3 - 2 = 1 long, and its row begins with"
                " block 0 or block 1: the values 0 and 2, log-sum-exp 1.",
                "[torch.arange(6.0).view(3, 2)[block, 0].item() for block in (0, 1)]",
                "[0.0, 2.0]",
                step="attend to the rest of each sequence",
            ),
            StoryStep(
                "exp(1.6931) to exp(1) is 2 to 1: two thirds of 4.5 and a third of the own value.",
                "[round(2 / 3 * 4.5 + own / 3, 4) for own in (0, 2)]",
                "[3.0, 3.6667]",
                step="merge both results by their log-sum-exp",
            ),
        ),
    ),
)
