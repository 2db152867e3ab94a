"""The worked examples and the picture of metadata."""

from rich.text import Text

from .drawing import A, B, beside, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    cells = [("r0", A), ("r1", B), ("r1", B), ("r1", B)]
    batch = beside(
        [
            Text("token"),
            Text(),
            Text("request"),
            Text(),
            Text("position"),
            Text("slot"),
        ],
        [
            under(["0", "1", "2", "3"]),
            *boxes(cells),
            under(["4", "0", "1", "2"]),
            under(["8", "20", "21", "22"]),
        ],
    )
    return [
        *said("The new tokens of all requests are one flat batch:", ""),
        *batch,
        *said(
            "",
            "query_start_loc  0, 1, 4   where each request starts, and the end",
            "seq_lens         5, 3      keys of each sequence after this step",
        ),
    ]


EXAMPLES = (
    Example(
        "build_common_attn_metadata",
        "Request 0 decodes its fifth token; request 1 starts with three.",
        (
            StoryStep(
                "Request 0 writes position 4 to block 2, slot 8; request 1 writes positions 0"
                " to 2 to block 5, slots 20 to 22.",
                "[2 * 4, 5 * 4, 5 * 4 + 1, 5 * 4 + 2]",
                "[8, 20, 21, 22]",
                step="compute the slots of the new tokens",
            ),
            StoryStep(
                "The rows have 2 and 1 entries, so the table is 2 wide; the 0 after row 1"
                " means nothing.",
                "step.block_table_tensor.tolist()",
                "[[7, 2], [5, 0]]",
                step="pad the rows to one table",
            ),
            StoryStep(
                "Request 0 starts at token 0, request 1 at token 1, and the batch ends at 4.",
                "[0, 0 + 1, 1 + 3]",
                "[0, 1, 4]",
                step="compute the start of each request",
            ),
            StoryStep(
                "After this step the sequences have 4 + 1 and 0 + 3 tokens.",
                "[4 + 1, 0 + 3]",
                "[5, 3]",
                step="compute the length of each sequence",
            ),
            StoryStep(
                "Attention reads these on the device. The host keeps its own copy of starts"
                " and lengths, so that planning never waits for the device.",
                "step.query_start_loc_cpu.tolist()",
                "[0, 1, 4]",
                step="copy everything to the device",
            ),
        ),
    ),
    Example(
        "build_attn_metadata",
        "Two layers of one group share the metadata of two decodes.",
        (
            StoryStep(
                "The buffers hold three requests, but the batch has two: starts 0,"
                " 1, 2 and lengths 7, 3.",
                "starts[: 2 + 1].tolist()",
                "[0, 1, 2]",
                step="slice the buffers to the batch",
            ),
            StoryStep(
                "Both requests have one new token, so the longest query has 1, although the"
                " batch has 2 tokens. Every layer of the group gets the same object.",
                "(max(1 - 0, 2 - 1), len(metadata))",
                "(1, 2)",
                step="build once per group and assign the result to its layers",
            ),
        ),
    ),
)
