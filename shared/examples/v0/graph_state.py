"""The worked examples and the picture of graph_state."""

from rich.text import Text

from ..drawing import DIM, NEW, A, B, beside, boxes, said, under
from ..story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    lens = boxes([("6", A), ("9", B), ("1", DIM), ("1", DIM)])
    slots = boxes([("9", NEW), ("32", NEW), ("-1", DIM), ("-1", DIM)])
    names = ["req 0", "req 1", "", ""]
    return [
        *said(
            "A step captured for four requests runs two. The batch is in the first rows of",
            "the buffers; the rows after it store nothing and see one key:",
            "",
        ),
        *beside(
            [Text("seq_lens_tensor"), *lens, under(names, 5)],
            [Text("slot_mapping"), *slots, under(names, 5)],
        ),
    ]


EXAMPLES = (
    Example(
        "get_attn_cg_support",
        "A model whose second layer has a backend that no graph can hold.",
        (
            StoryStep(
                "No layers are selected, so both groups count.",
                'len(["layer 0", "layer 1"])',
                "2",
                step="skip groups without a requested layer",
            ),
            StoryStep(
                "One graph holds the whole step, so it can do what the weakest backend can:"
                " of the levels 3 and 0 the model gets 0.",
                "min(AttentionCGSupport.ALWAYS.value, AttentionCGSupport.NEVER.value)",
                "0",
                step="keep the weakest level and its backend",
            ),
        ),
    ),
    Example(
        "CommonAttentionState",
        "A step captured for four requests is refilled with two.",
        (
            StoryStep(
                "A new slot buffer contains only -1: a step that runs now stores nothing.",
                "GraphInputBuffers.harmless(4, 3, False, torch.device('cpu'))"
                ".slot_mapping.tolist()",
                "[-1, -1, -1, -1]",
                step="allocate buffers with harmless values",
            ),
            StoryStep(
                "The metadata of a step for four requests has tensors in the memory of the"
                " buffers. A step for two would get the first two rows.",
                "len(captured.block_tables)",
                "4",
                step="take the first rows of the buffers",
            ),
            StoryStep(
                "Kernels are launched for the longest sequence that may come: 12 tokens.",
                "captured.max_decode_seq_len",
                "12",
                step="declare the longest sequence of any replay",
            ),
            StoryStep(
                "The batch has two requests. Their slots 9 and 32 go to the front, and so do"
                " their lengths and rows.",
                "buffers.slot_mapping[:2].tolist()",
                "[9, 32]",
                step="copy the live batch to the first rows",
            ),
            StoryStep(
                "Rows 2 and 3 are padding. They get slot -1 and length 1, whatever an"
                " older batch had written there.",
                "[buffers.slot_mapping[2:].tolist(), buffers.seq_lens_tensor[2:].tolist()]",
                "[[-1, -1], [1, 1]]",
                step="fill the padding with harmless values",
            ),
            StoryStep(
                "To capture a step, its inputs (a layer's query, say) get a copy that stays;"
                " the step reads the copy.",
                "torch.ones(4, 1).clone().shape[0]",
                "4",
                step="copy the inputs to persistent buffers",
            ),
            StoryStep(
                "It runs once on the four harmless requests, one token each.",
                "captured.query_start_loc.diff().tolist()",
                "[1, 1, 1, 1]",
                step="run the step once with harmless values",
            ),
            StoryStep(
                "Then it is recorded, launch by launch; here every launch covers all"
                " four requests.",
                "captured.num_decode_tokens",
                "4",
                step="record the step",
            ),
            StoryStep(
                "To replay a batch of two with steps of 1, 4 and 8 requests at hand, the one of"
                " 4 is taken.",
                "min(size for size in (1, 4, 8) if size >= 2)",
                "4",
                step="choose the smallest step that holds the batch",
            ),
            StoryStep(
                "Its buffers are refilled as above, its inputs too: the live rows to the front.",
                "batch.num_decode_tokens",
                "2",
                step="refill its buffers",
            ),
            StoryStep(
                "It runs, and of its four rows the first two are the result.",
                "4 - 2",
                "2",
                step="run it",
            ),
        ),
    ),
)
