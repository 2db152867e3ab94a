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
        "view_kv_cache",
        "Six bytes whose first axis lies inside the second.",
        """\
>>> raw = torch.arange(6, dtype=torch.int8)
>>> view_kv_cache(raw, torch.int8, shape=(2, 3), stride_order=(1, 0))
tensor([[0, 2, 4],
        [1, 3, 5]], dtype=torch.int8)
""",
        (
            StoryStep(
                "Axis 1 is the outermost in memory, so axis 0 lies inside it: a step along"
                " axis 0 is one element, and a step along axis 1 passes the two elements of"
                " axis 0.",
                "view_kv_cache(raw, torch.int8, (2, 3), (1, 0)).stride()",
                "(1, 2)",
                step="view the bytes with the axes in memory order",
            ),
            StoryStep(
                "Code indexes row 1, column 2 as ever; it lies 1 * 1 + 2 * 2 = 5 elements into"
                " the memory.",
                "view_kv_cache(raw, torch.int8, (2, 3), (1, 0))[1, 2].item()",
                "5",
                step="permute the axes to the order of the shape",
            ),
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
                "The five axes multiply to exactly these elements. The view lies on the same"
                " memory: nothing was copied.",
                "2 * 10 * 16 * 8 * 64",
                "163840",
                step="view them with the five axes",
            ),
        ),
    ),
    Example(
        "kv_cache",
        "reshape_layered_kv_cache",
        "Four layers in one allocation, block by block.",
        """\
>>> spec = KVCacheSpec(16, 8, 64, torch.float16)
>>> raw = torch.zeros(4 * 10 * 32768, dtype=torch.int8)
>>> caches = reshape_layered_kv_cache(
...     raw, spec, num_layers=4, layout=KVCacheLayout.BLNHC
... )
>>> caches[0].shape
torch.Size([2, 10, 16, 8, 64])
""",
        (
            StoryStep(
                "A page of all layers has 4 * 32,768 bytes; ten of them are there.",
                "raw.numel() // (4 * spec.page_size_bytes)",
                "10",
                step="count the pages",
            ),
            StoryStep(
                "BLNHC: the block is outermost. So block 3 of all four layers lies together"
                " and moves in one copy: 4 * 16,384 elements from one block to the next.",
                "caches.stride(2)",
                "65536",
                step="view layer, block, head, slot and content",
            ),
            StoryStep(
                "A slot's key and value of one head lie side by side: the value 64 elements"
                " behind the key. A layer's cache has the same five axes as ever.",
                "caches[0].stride(0)",
                "64",
                step="split the content into key and value",
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
    Example(
        "kv_cache",
        "get_packed_kv_cache_shape",
        "Two blocks of four tokens, for 2 heads of 16 elements.",
        """\
>>> get_packed_kv_cache_shape(
...     num_blocks=2, block_size=4, num_kv_heads=2, head_size=16
... )
(2, 2, 128)
""",
        (
            StoryStep(
                "A block is not cut further here: keys and values are cut in different ways,"
                " each by its view.",
                "4 * 2 * 16",
                "128",
            ),
        ),
    ),
    Example(
        "kv_cache",
        "split_packed_kv_cache",
        "Keys in parts of 16 bytes, values element by element.",
        """\
>>> kv_cache = torch.zeros(2, 2, 128, dtype=torch.float16)
>>> key_cache, value_cache = split_packed_kv_cache(
...     kv_cache, num_kv_heads=2, head_size=16
... )
>>> key_cache.shape
torch.Size([2, 2, 2, 4, 8])
>>> value_cache.shape
torch.Size([2, 2, 16, 4])
""",
        (
            StoryStep(
                "A token's key has 2 * 16 elements, so a block of 128 has 4 slots. A float16"
                " element has 2 bytes, so 8 of them make 16.",
                "(128 // (2 * 16), 16 // 2)",
                "(4, 8)",
                step="compute the block size and the elements per 16 bytes",
            ),
            StoryStep(
                "A head's key of 16 elements is 2 parts; the same part of the next slot lies 8"
                " elements further on.",
                "key_cache.stride(3)",
                "8",
                step="view the keys in groups of 16 bytes",
            ),
            StoryStep(
                "Of the values, the same element of the next slot lies beside it.",
                "value_cache.stride(3)",
                "1",
                step="view the values by element",
            ),
        ),
    ),
)
