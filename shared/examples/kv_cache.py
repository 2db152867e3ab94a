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
        "get_kv_cache_shape",
        "Ten blocks of 16 tokens, for 8 heads of 64 elements.",
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
        "allocate_kv_cache",
        "Ten pages in float16 are 327,680 bytes.",
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
        "view_kv_cache",
        "Six bytes with the second axis outermost in memory.",
        (
            StoryStep(
                "Axis 1 is the outermost in memory, so axis 0 is inner: a step along"
                " axis 0 is one element, and a step along axis 1 passes the two elements of"
                " axis 0.",
                "view_kv_cache(raw, torch.int8, (2, 3), (1, 0)).stride()",
                "(1, 2)",
                step="view the bytes with the axes in memory order",
            ),
            StoryStep(
                "Code indexes row 1, column 2 as always; its offset in memory is"
                " 1 * 1 + 2 * 2 = 5 elements.",
                "view_kv_cache(raw, torch.int8, (2, 3), (1, 0))[1, 2].item()",
                "5",
                step="permute the axes to the order of the shape",
            ),
        ),
    ),
    Example(
        "reshape_kv_cache",
        "The same bytes, seen as ten blocks.",
        (
            StoryStep(
                "The bytes make ten pages, and none is left over.",
                "divmod(327680, 32768)",
                "(10, 0)",
                step="count the pages",
            ),
            StoryStep(
                "The five axes multiply to exactly these elements. The view is on the same"
                " memory: nothing was copied.",
                "2 * 10 * 16 * 8 * 64",
                "163840",
                step="view them with the five axes",
            ),
        ),
    ),
    Example(
        "reshape_layered_kv_cache",
        "Four layers in one allocation, block by block.",
        (
            StoryStep(
                "A page of all layers has 4 * 32,768 bytes; ten of them are there.",
                "raw.numel() // (4 * spec.page_size_bytes)",
                "10",
                step="count the pages",
            ),
            StoryStep(
                "BLNHC: the block is outermost. So block 3 of all four layers is contiguous"
                " and moves in one copy: 4 * 16,384 elements from one block to the next.",
                "caches.stride(2)",
                "65536",
                step="view layer, block, head, slot and content",
            ),
            StoryStep(
                "Key and value of a slot and head are adjacent: the value 64 elements"
                " after the key. A layer's cache has the same five axes as always.",
                "caches[0].stride(0)",
                "64",
                step="split the content into key and value",
            ),
        ),
    ),
    Example(
        "split_kv_cache",
        "One cache, two views: its keys and its values.",
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
    Example(
        "get_packed_kv_cache_shape",
        "Two blocks of four tokens, for 2 heads of 16 elements.",
        (
            StoryStep(
                "A block has no further axes here: keys and values are ordered differently,"
                " each by its view.",
                "4 * 2 * 16",
                "128",
            ),
        ),
    ),
    Example(
        "split_packed_kv_cache",
        "Keys in parts of 16 bytes, values element by element.",
        (
            StoryStep(
                "A token's key has 2 * 16 elements, so a block of 128 has 4 slots. A float16"
                " element has 2 bytes, so 8 of them make 16.",
                "(128 // (2 * 16), 16 // 2)",
                "(4, 8)",
                step="compute the block size and the elements per 16 bytes",
            ),
            StoryStep(
                "A head's key of 16 elements is 2 groups; the same group of the next slot is 8"
                " elements further on.",
                "key_cache.stride(3)",
                "8",
                step="view the keys in groups of 16 bytes",
            ),
            StoryStep(
                "Of the values, the same element of the next slot is adjacent.",
                "value_cache.stride(3)",
                "1",
                step="view the values by element",
            ),
        ),
    ),
)
