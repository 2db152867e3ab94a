"""The worked examples and the picture of graph_state."""

from rich.text import Text

from .drawing import DIM, NEW, A, B, beside, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    lens = boxes([("6", A), ("9", B), ("1", DIM), ("1", DIM)])
    slots = boxes([("9", NEW), ("32", NEW), ("-1", DIM), ("-1", DIM)])
    names = ["req 0", "req 1", "", ""]
    return [
        *said(
            "A step captured for four requests runs two. The batch stands at the front of",
            "the buffers; the rows behind it store nothing and see one key:",
            "",
        ),
        *beside(
            [Text("seq_lens_tensor"), *lens, under(names, 5)],
            [Text("slot_mapping"), *slots, under(names, 5)],
        ),
    ]


EXAMPLES = (
    Example(
        "graph_state",
        "get_attn_cg_support",
        "A model whose second layer has a backend that no graph can hold.",
        """\
>>> get_attn_cg_support(
...     [
...         [GroupSupport(AttentionCGSupport.ALWAYS, "TRITON", ("layer 0",))],
...         [GroupSupport(AttentionCGSupport.NEVER, "XFORMERS", ("layer 1",))],
...     ]
... ).min_cg_attn_backend
'XFORMERS'
""",
        (
            StoryStep(
                "Nobody asks for certain layers only, so both groups count.",
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
        "graph_state",
        "CommonAttentionState",
        "A step captured for four requests is refilled with two.",
        """\
>>> state = CommonAttentionState(max_blocks=3, max_seq_len_to_capture=12)
>>> with state.graph_capture(max_batch_size=4):
...     captured = state.graph_capture_get_metadata_for_batch(4)
>>> buffers = state.get_graph_input_buffers(captured)
>>> batch = SequenceAttentionMetadata(
...     num_prefills=0,
...     num_prefill_tokens=0,
...     num_decode_tokens=2,
...     slot_mapping=torch.tensor([9, 32]),
...     multi_modal_placeholder_index_maps=None,
...     enable_kv_scales_calculation=False,
...     seq_lens_tensor=torch.tensor([6, 9], dtype=torch.int32),
...     max_decode_seq_len=9,
...     block_tables=torch.tensor(
...         [[7, 2, 0], [5, 6, 8]], dtype=torch.int32
...     ),
... )
>>> state.prepare_graph_input_buffers(buffers, batch)
>>> buffers.slot_mapping
tensor([ 9, 32, -1, -1])
>>> buffers.seq_lens_tensor
tensor([6, 9, 1, 1], dtype=torch.int32)
>>> captured.block_tables
tensor([[7, 2, 0],
        [5, 6, 8],
        [0, 0, 0],
        [0, 0, 0]], dtype=torch.int32)
""",
        (
            StoryStep(
                "A new buffer of slots holds -1 only: a step that runs now stores nothing.",
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
                "Rows 2 and 3 belong to nobody. They get slot -1 and length 1, whatever an"
                " older batch had left there.",
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
                "Then it is recorded, launch by launch; here every launch has room for all"
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
