"""The worked examples and the picture of step_buffers."""

from rich.text import Text

from .drawing import DIM, NEW, A, beside, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    steps = (
        ("step 1", ["28", "29", "30"]),
        ("step 2", ["31"]),
        ("step 3", ["8", "-1"]),
    )
    lines = said("The same slot_mapping, written anew each step:", "")
    for name, slots in steps:
        cells = [(slot, DIM if slot == "-1" else NEW) for slot in slots]
        cells += [("", DIM)] * (4 - len(cells))
        table = [("7", A), ("2", A) if name == "step 3" else ("", DIM)]
        lines += beside(
            [Text(), Text(name), Text()],
            boxes(cells),
            [Text(), Text("row 0"), Text()],
            boxes(table),
        )
    return [
        *lines,
        under(
            ["block 2 was appended before step 3; step 3 is padded to two"], width=70
        ),
    ]


EXAMPLES = (
    Example(
        "StepBuffers",
        "One request's first three steps, the last one padded to two.",
        (
            StoryStep(
                "Row 0 gets block 7 before the first step, and block 2 after it before the"
                " third.",
                "[7] + [2]",
                "[7, 2]",
                step="append the new ids to each row",
            ),
            StoryStep(
                "The third step's token has position 4: entry 1 of the row, block 2, first"
                " slot.",
                "[7, 2][4 // 4] * 4 + 4 % 4",
                "8",
                step="compute the slots of the new tokens",
            ),
            StoryStep(
                "The graph was captured for two requests and two tokens. So there is an empty"
                " request, of length 0, and a token without a slot.",
                "(step.num_reqs, step.num_actual_tokens)",
                "(2, 1)",
                step="pad to the size of the captured graph",
            ),
            StoryStep(
                "The step is stored at the same address as the one before it.",
                "step.slot_mapping.data_ptr() == buffers.build([1], [4]).slot_mapping.data_ptr()",
                "True",
                step="copy everything to the device",
            ),
            StoryStep(
                "Request 0 has row 0, so the table needs no reordering.",
                "step.block_table_tensor[0].tolist()",
                "[7, 2]",
                step="copy the rows in batch order",
            ),
        ),
    ),
)
