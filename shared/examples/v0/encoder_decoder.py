"""The worked examples and the picture of encoder_decoder."""

from rich.text import Text

from ..drawing import A, B, beside, boxes, said
from ..story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    encoder = boxes([("e0", A), ("e1", A), ("e2", A)])
    decoder = boxes([("d0", B), ("d1", B)])
    return [
        *beside(
            [Text(), Text("encoder"), Text()],
            encoder,
            [Text(), Text("decoder"), Text()],
            decoder,
        ),
        *said(
            "",
            "type             queries        keys           key location",
            "decoder          d0, d1         d0, d1         block table",
            "encoder          e0, e1, e2     e0, e1, e2     in the step itself",
            "encoder_decoder  d0, d1         e0, e1, e2     the cross block table",
            "encoder_only     the prompt     the prompt     in the step itself",
        ),
    ]


EXAMPLES = (
    Example(
        "is_all_encoder_attn_metadata_set",
        "The lengths of the encoder's sequences are there, on both sides, and the longest.",
        (
            StoryStep(
                "Three fields are needed: lengths on the host, on the device, and the longest.",
                "None in ([3], 3)",
                "False",
            ),
        ),
    ),
    Example(
        "is_all_cross_attn_metadata_set",
        "Lengths alone do not determine the location of the encoder's keys.",
        (
            StoryStep(
                "Cross-attention writes the encoder's keys to slots and reads them through a"
                " block table of their own; this metadata has neither.",
                "all(field is not None for field in (None, None))",
                "False",
            ),
        ),
    ),
    Example(
        "get_seq_len_block_table_args",
        "Cross-attention reads the encoder's 3 tokens through the cross block table.",
        (
            StoryStep(
                "A kind whose keys are the sequence's own takes its lengths; the prompt would"
                " have 2 here. This kind's keys are not.",
                "'encoder_decoder' in ('decoder', 'encoder_only')",
                "False",
                step="select the sequence's own tokens",
            ),
            StoryStep(
                "The encoder has 3 tokens. With blocks of 4 they are in block 6, slots 24 to 26.",
                "[6 * 4 + token for token in range(3)]",
                "[24, 25, 26]",
                step="select the encoder's tokens",
            ),
        ),
    ),
    Example(
        "get_num_prefill_decode_query_kv_tokens",
        "Two prompt tokens attend to three encoder tokens.",
        (
            StoryStep(
                "In a decoder each new token has a query and a key: 2 and 2. Across, the"
                " keys are the encoder's: 2 and 3. Nothing decodes in this step.",
                "(2, 3, 0)",
                "(2, 3, 0)",
            ),
        ),
    ),
)
