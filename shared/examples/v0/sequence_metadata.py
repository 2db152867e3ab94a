"""The worked examples and the picture of sequence_metadata."""

from rich.text import Text

from ..drawing import DIM, A, B, beside, boxes, said, under
from ..story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    batch = beside(
        [Text("token"), Text(), Text("sequence"), Text(), Text("slot")],
        [
            under(["0", "1", "2"]),
            *boxes([("s0", A), ("s0", A), ("s0", A)]),
            under(["20", "21", "22"]),
        ],
        [under(["3"]), *boxes([("s1", B)]), under(["8"])],
    )
    tables = beside(
        [Text(), Text("s0 reads"), Text()],
        boxes([("", DIM), ("", DIM)]),
        [Text(), Text("s1 reads"), Text()],
        boxes([("7", B), ("2", B)]),
    )
    return [
        *said("Prompts come first (s0), decodes after them (s1):", ""),
        *batch,
        *said("", "A prompt whose keys are all new reads nothing from the cache:"),
        *tables,
    ]


EXAMPLES = (
    Example(
        "is_block_tables_empty",
        "Without a row for any sequence the cache is missing; an empty row is a row.",
        (
            StoryStep(
                "A run that measures memory has no cache yet, so its sequences have no rows:"
                " None for both.",
                "all(row is None for row in {0: None, 1: None}.values())",
                "True",
            ),
            StoryStep(
                "A sequence that has not been given a block yet has a row, if an empty one.",
                "[] is None",
                "False",
            ),
        ),
    ),
    Example(
        "make_tensor_with_pad",
        "Two rows become one tensor, padded with -1.",
        (
            StoryStep(
                "The tensor is 3 wide, so row 0 has 1 padding entry and row 1 has 2.",
                "[3 - len(row) for row in [[7, 2], [5]]]",
                "[1, 2]",
            ),
            StoryStep(
                "They get the padding that the caller chose; a block table would take 0.",
                "[5] + [-1] * 2",
                "[5, -1, -1]",
            ),
        ),
    ),
    Example(
        "CommonMetadataBuilder",
        "Sequence 0 starts with a prompt of three tokens; sequence 1 decodes its fifth.",
        (
            StoryStep(
                "Neither group has images, so the placeholder maps are empty.",
                "builder.multimodal_placeholder_maps",
                "{}",
                step="count the placeholders",
            ),
            StoryStep(
                "Sequence 0 has nothing in the cache: attention takes its keys from the layer,"
                " and its row stays empty. Sequence 1 reads both of its blocks.",
                "builder.block_tables",
                "[[], [7, 2]]",
                step="keep the blocks that attention reads",
            ),
            StoryStep(
                "One prompt with 3 tokens, and one token of a decode.",
                "builder.num_prefills, builder.num_prefill_tokens, builder.num_decode_tokens",
                "(1, 3, 1)",
                step="count the tokens",
            ),
            StoryStep(
                "The prompt writes positions 0 to 2 of block 5, the decode position 4: the"
                " first slot of block 2. That a row is empty means no reading, not no writing.",
                "[5 * 4, 5 * 4 + 1, 5 * 4 + 2, 2 * 4]",
                "[20, 21, 22, 8]",
                step="compute the slots of the new tokens",
            ),
            StoryStep(
                "No graph is replayed here, so nothing is added. A graph of four sequences"
                " would get two more, each with one token that is not stored.",
                "4 - len(builder.block_tables)",
                "2",
                step="pad the batch to the captured size",
            ),
            StoryStep(
                "The longest row has 2 entries; shorter rows are padded with zeros.",
                "[row + [0] * (2 - len(row)) for row in builder.block_tables]",
                "[[0, 0], [7, 2]]",
                step="pad the rows to one table",
            ),
            StoryStep(
                "New tokens start at 0 and 3 and end at 4; whole sequences of 3 and 5 would"
                " start at 0 and 3 and end at 8.",
                "step.query_start_loc.tolist(), step.seq_start_loc.tolist()",
                "([0, 3, 4], [0, 3, 8])",
                step="compute the start of each sequence",
            ),
            StoryStep(
                "With images, this holds each embedding's row and token.",
                "step.multi_modal_placeholder_index_maps",
                "{}",
                step="convert the placeholders to index maps",
            ),
            StoryStep(
                "The metadata can be split where the decodes begin; their starts begin at 0.",
                "step.decode_metadata.query_start_loc.tolist()",
                "[0, 1]",
                step="copy everything to the device",
            ),
        ),
    ),
)
