"""The worked examples and the picture of cache_ops."""

from rich.text import Text

from .drawing import DIM, NEW, beside, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    tokens = beside(
        [Text(), Text("new keys"), Text(), Text("slots")],
        [*boxes([("5", NEW), ("6", DIM)]), under(["9", "-1"])],
    )
    columns = []
    for block in range(3):
        slots = range(block * 4, block * 4 + 4)
        cells = [("5", NEW) if slot == 9 else ("", DIM) for slot in slots]
        columns.append(
            [
                Text(f"block {block}"),
                *boxes(cells),
                under([str(slot) for slot in slots]),
            ]
        )
    return [
        *tokens,
        *said("", "Slot 9 is offset 1 of block 2; slot -1 is nowhere:", ""),
        *beside(*columns),
    ]


EXAMPLES = (
    Example(
        "reshape_and_cache",
        "Token 0 goes to slot 9, token 1 nowhere; then into caches of eight and four bits.",
        (
            StoryStep(
                "The slots are 9 and -1. Token 1 has a negative one: it is not stored, and the"
                " 6 appears nowhere.",
                "[slot < 0 for slot in (9, -1)]",
                "[False, True]",
                step="skip tokens without a slot",
            ),
            StoryStep(
                "Blocks have 4 slots, so slot 9 is offset 1 of block 2.",
                "divmod(9, 4)",
                "(2, 1)",
                step="find block and offset",
            ),
            StoryStep(
                "The first cache is float32 and takes the 5 as it is. The second is FP8: its key"
                " becomes 5 / 0.5 = 10. The value would become 5 / 0.01 = 500, which is more"
                " than the largest number of float8_e4m3fn, and becomes that number.",
                "torch.finfo(torch.float8_e4m3fn).max",
                "448.0",
                step="encode the key and the value in the format of the cache",
            ),
            StoryStep(
                "The third is int8_per_token_head. Its write measures the scale: the largest size"
                " of the key is 5, so the scale is 5 / 127 = 0.0394, and the code 127.",
                "round(float(codes[2, 1] * scales[2, 1]), 6)",
                "5.0",
            ),
            StoryStep(
                "The fourth is int4_per_token_head. The row [4, 1] is rotated: its second number"
                " changes its sign, and sum and difference are [3, 5]. The range from 0 to 5 has"
                " 15 steps, so the scale is 5 / 15 = 0.3333, and the levels are 9 and 15, with 0"
                " at level 0. The first is the low half of the byte.",
                "9 + 15 * 16",
                "249",
            ),
            StoryStep(
                "Levels times the scale are [3, 5] again. Rotated back, they are half of their"
                " sum, and half of the second minus the first.",
                "((3 + 5) / 2, (5 - 3) / 2)",
                "(4.0, 1.0)",
            ),
            StoryStep(
                "The last is nvfp4. The largest size of the block of 16 is 6, which is the largest"
                " code, and the global scale is 0.5: the block scale is 6 / 6 / 0.5 = 2. Divided"
                " by 2 * 0.5 = 1, the numbers 6, 4.8, -1 and 0.4 have the nearest codes 6, 4, -1"
                " and 0.5. They are the numbers 7, 6, 2 and 1 of the list 0, 0.5, 1, 1.5, 2, 3,"
                " 4, 6, and a negative code has 8 more.",
                "[7 + 6 * 16, (2 + 8) + 1 * 16]",
                "[103, 26]",
            ),
            StoryStep(
                "Both are stored there; counted through, that is place 9 of the 12. Read back"
                " and multiplied by its scale, the key is 5 again; the scale of the value was"
                " too small.",
                "float(key_cache[2, 1]) * 0.5",
                "5.0",
                step="store the key and the value",
            ),
        ),
    ),
    Example(
        "gather_cache",
        "A sequence of six tokens, read back from blocks 2 and 0; then from eight bits.",
        (
            StoryStep(
                "Positions 0 to 3 belong to entry 0 of the row, block 2; positions 4 and 5 to"
                " entry 1, block 0.",
                "[[2, 0][position // 4] for position in range(6)]",
                "[2, 2, 2, 2, 0, 0]",
                step="look up the block",
            ),
            StoryStep(
                "Within their block they are numbers 0 to 3, then 0 and 1.",
                "[position % 4 for position in range(6)]",
                "[0, 1, 2, 3, 0, 1]",
                step="add the offset in the block",
            ),
            StoryStep(
                "In this cache every slot holds its own number, so the keys tell where they"
                " came from: slots 8 to 11, then 0 and 1.",
                "[2 * 4, 2 * 4 + 3, 0 * 4, 0 * 4 + 1]",
                "[8, 11, 0, 1]",
                step="copy the key and the value",
            ),
            StoryStep(
                "The FP8 cache holds the same numbers. Asked for float32, it gives what they"
                " stand for: times 0.5 the keys, times 1 the values.",
                "value.flatten().tolist()",
                "[8.0, 9.0, 10.0, 11.0, 0.0, 1.0]",
                step="multiply by the scales if another dtype is requested",
            ),
        ),
    ),
    Example(
        "copy_blocks",
        "Block 2 is copied over block 0, keys and values.",
        (
            StoryStep(
                "Three blocks of one slot: their keys are 0, 1, 2, their values 3, 4, 5.",
                "torch.arange(6.0).view(2, 3).tolist()",
                "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]",
            ),
            StoryStep(
                "The pair (2, 0) reads block 2: key 2, value 5.",
                "kv_cache[:, 2].flatten().tolist()",
                "[2.0, 5.0]",
            ),
            StoryStep(
                "Block 0 holds the same now. Two sequences that shared block 2 may go on in"
                " one each.",
                "kv_cache[:, 0].flatten().tolist()",
                "[2.0, 5.0]",
            ),
        ),
    ),
    Example(
        "swap_blocks",
        "Block 2 of one cache moves to block 0 of another.",
        (
            StoryStep(
                "The source has three blocks, keys 0, 1, 2 and values 3, 4, 5; the host has"
                " room for two.",
                "list(on_host.shape[:2])",
                "[2, 2]",
            ),
            StoryStep(
                "The pair (2, 0) copies key 2 and value 5 to block 0 of the host; its block 1"
                " stays zero.",
                "on_host[:, 0].flatten().tolist()",
                "[2.0, 5.0]",
            ),
            StoryStep(
                "When memory is free again, the reversed pair copies them back.",
                "[2, 0][::-1]",
                "[0, 2]",
            ),
        ),
    ),
)
