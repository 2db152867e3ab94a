"""The worked examples and the picture of kv_cache_init."""

from rich.text import Text

from .drawing import DIM, A, B, beside, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    first = boxes([("0", A), ("1", B), ("2", A), ("3", "")])
    second = boxes([("0", A), ("1", B), ("2", A), ("3", "")])
    return [
        *said("Two groups of two layers, and two tensors of four blocks:"),
        *beside(
            [Text("tensor 0: layers 0 and 1", style=DIM), *first, under([""] * 4)],
            [Text("tensor 1: layers 2 and 3", style=DIM), *second, under([""] * 4)],
        ),
        Text("group 0: layers 0 and 2 own blocks 0 and 2", style=A),
        Text("group 1: layers 1 and 3 own block 1", style=B),
        *said("Block 3 is free. Either group can get it: in both tensors at once."),
    ]


EXAMPLES = (
    Example(
        "get_kv_cache_spec",
        "Of two layers that share a cache, one has the spec.",
        (
            StoryStep(
                "Layer 0 stores keys and values of 16 tokens, 2 heads of 64 elements, 2 bytes"
                " each.",
                "2 * 16 * 2 * 64 * 2",
                "8192",
            ),
            StoryStep(
                "Layer 1 reads the cache of layer 0, so it needs no memory.",
                "layers['layers.1'].get_kv_cache_spec(16, torch.float16) is None",
                "True",
            ),
        ),
    ),
    Example(
        "allocate_kv_caches",
        "Two layers of different groups, one tensor.",
        (
            StoryStep(
                "Two blocks of 16 slots, 2 heads, 8 elements of 2 bytes, keys and values.",
                "2 * (2 * 16 * 2 * 8 * 2)",
                "2048",
            ),
            StoryStep(
                "Both layers see all of the bytes. A block is allocated to one group, so they"
                " never meet in one.",
                "raw['layers.1'].data_ptr() == raw['layers.0'].data_ptr()",
                "True",
            ),
        ),
    ),
    Example(
        "reshape_kv_caches",
        "A cache with the heads outside the slots (HND).",
        (
            StoryStep(
                "A page has 1,024 bytes, so 2,048 make two blocks.",
                "2048 // spec.page_size_bytes",
                "2",
                step="count the pages",
            ),
            StoryStep(
                "The backend's five axes do not change. Under HND a step to the next slot is the 8"
                " elements of a head, and a step to the next head passes 16 slots.",
                "kv_caches['layers.0'].stride()[2:4]",
                "(8, 128)",
                step="view them in the backend's shape",
            ),
        ),
    ),
    Example(
        "bind_kv_cache",
        "Layer 9 comes before layer 10.",
        (
            StoryStep(
                "In alphabetical order, the names would be the other way round.",
                "sorted(caches)",
                "['layers.10.attn', 'layers.9.attn']",
                step="sort the caches by layer number",
            ),
            StoryStep(
                "Each layer holds its own cache from now on.",
                "layers['layers.10.attn'].kv_cache is caches['layers.10.attn']",
                "True",
                step="bind each layer's cache",
            ),
            StoryStep(
                "A layer that shares another one's cache would get that tensor; here there"
                " is none.",
                "[hasattr(layer, 'kv_sharing_target_layer_name') for layer in layers.values()]",
                "[False, False]",
                step="bind the shared caches to the other layers",
            ),
        ),
    ),
    Example(
        "init_kv_cache",
        "A model of one layer, ready to run.",
        (
            StoryStep(
                "The config has one tensor of 2,048 bytes.",
                "config.kv_cache_tensors[0].size",
                "2048",
                step="allocate",
            ),
            StoryStep(
                "Seen by its backend, these are two blocks of 16 slots.",
                "kv_caches['layers.0'].shape[1:3]",
                "torch.Size([2, 16])",
                step="view the bytes as caches",
            ),
            StoryStep(
                "The layer now holds that view.",
                "layers['layers.0'].kv_cache is kv_caches['layers.0']",
                "True",
                step="bind them to the layers",
            ),
        ),
    ),
)
