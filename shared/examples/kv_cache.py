"""The worked examples and the picture of kv_cache."""

from rich.text import Text

from .drawing import DIM, PLAIN, A, B, boxes, said
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    raw = boxes([("327,680 bytes, taken once", PLAIN)], width=59)
    halves = boxes([("keys", A), ("values", B)], width=29)
    blocks = boxes([*[("", A)] * 10, *[("", B)] * 10], width=2)
    numbers = Text(" ".join(f"{block:2}" for block in [*range(10)] * 2), style=DIM)
    numbers = Text(" ").append_text(numbers)
    return [
        *raw,
        *halves,
        *blocks,
        numbers,
        *said("", "One block of keys: 16 slots. One slot: 8 heads of 64 elements."),
    ]


EXAMPLES = (
    Example(
        "kv_cache",
        "get_kv_cache_shape",
        "Ten blocks of 16 tokens, for 8 heads of 64 elements.",
        """\
>>> get_kv_cache_shape(
...     num_blocks=10, block_size=16, num_kv_heads=8, head_size=64
... )
(2, 10, 16, 8, 64)
""",
        (
            StoryStep(
                "Keys and values are the first axis, so each half is one contiguous tensor.",
                "get_kv_cache_shape(10, 16, 8, 64)[0]",
                "2",
            ),
            StoryStep(
                "Block and slot come next: such a cache holds 160 tokens.",
                "10 * 16",
                "160",
            ),
            StoryStep(
                "A slot holds one token's key: 8 heads of 64 elements, side by side.",
                "8 * 64",
                "512",
            ),
        ),
    ),
    Example(
        "kv_cache",
        "allocate_kv_cache",
        "Ten pages in float16 are 327,680 bytes.",
        """\
>>> spec = KVCacheSpec(16, 8, 64, torch.float16)
>>> allocate_kv_cache(spec, num_blocks=10).shape
torch.Size([327680])
""",
        (
            StoryStep(
                "A page is what one block takes: keys and values of 16 tokens, 8 heads, 64"
                " elements.",
                "2 * 16 * 8 * 64",
                "16384",
            ),
            StoryStep(
                "A float16 element has 2 bytes.",
                "16384 * 2",
                "32768",
            ),
            StoryStep("Ten pages are taken at once.", "10 * 32768", "327680"),
        ),
    ),
    Example(
        "kv_cache",
        "reshape_kv_cache",
        "The same bytes, seen as ten blocks.",
        """\
>>> raw = torch.zeros(327680, dtype=torch.int8)
>>> reshape_kv_cache(raw, KVCacheSpec(16, 8, 64, torch.float16)).shape
torch.Size([2, 10, 16, 8, 64])
""",
        (
            StoryStep(
                "The bytes make ten pages, and none is left over.",
                "divmod(327680, 32768)",
                "(10, 0)",
                step="count the pages",
            ),
            StoryStep(
                "Two bytes make a float16 element.",
                "raw.view(torch.float16).numel()",
                "163840",
                step="look at the bytes as elements",
            ),
            StoryStep(
                "The five axes multiply to exactly these elements. The view lies on the same"
                " memory: nothing was copied.",
                "2 * 10 * 16 * 8 * 64",
                "163840",
                step="cut them into the five axes",
            ),
        ),
    ),
    Example(
        "kv_cache",
        "split_kv_cache",
        "One cache, two views: its keys and its values.",
        """\
>>> key_cache, value_cache = split_kv_cache(torch.zeros(2, 10, 16, 8, 64))
>>> key_cache.shape
torch.Size([10, 16, 8, 64])
""",
        (
            StoryStep(
                "Entry 0 of the first axis is the keys, entry 1 the values; both have the four"
                " axes that remain.",
                "value_cache.shape == key_cache.shape",
                "True",
            ),
            StoryStep(
                "The values begin where the keys end, in the same memory: 81,920 elements"
                " further on.",
                "value_cache.storage_offset() - key_cache.storage_offset()",
                "81920",
            ),
        ),
    ),
)
