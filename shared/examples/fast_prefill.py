"""The worked examples and the picture of fast_prefill."""

from rich.text import Text

from .drawing import DIM, NEW, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    wanted = (4, 7, 8)
    cells = [(f"t{t}", NEW if t in wanted else DIM) for t in range(9)]
    owners = ["r0"] * 5 + ["r1"] * 4
    kept = boxes([(f"t{t}", NEW) for t in wanted])
    return [
        *said("The new tokens of two requests, as the first layers see them:", ""),
        *boxes(cells),
        under(owners),
        *said("", "and as the last layers do, which only lead to logits:", ""),
        *kept,
        under(["r0", "r1", "r1"]),
    ]


EXAMPLES = (
    Example(
        "make_kv_sharing_fast_prefill_common_attn_metadata",
        "Of twenty new tokens, three go on to the last layers.",
        (
            StoryStep(
                "Tokens 0 to 14 are request 0's, tokens 15 to 19 request 1's. Of the first"
                " three indices (the fourth is padding) one is request 0's and two are"
                " request 1's.",
                "[sum(low <= t < high for t in (14, 18, 19)) for low, high in ((0, 15), (15, 20))]",
                "[1, 2]",
                step="count the wanted tokens of each request",
            ),
            StoryStep(
                "So the three queries start at 0 and 1, and end at 3.",
                "[0, 0 + 1, 0 + 1 + 2]",
                "[0, 1, 3]",
                step="compute the start of each request's wanted tokens",
            ),
            StoryStep(
                "Request 1 still has 13 keys. Its two queries are taken for its last two"
                " tokens: they see 12 and 13 keys, as they should.",
                "[13 - 2 + 1, 13 - 2 + 2]",
                "[12, 13]",
                step="build the metadata of a step with only these tokens",
            ),
        ),
    ),
    Example(
        "subclass_attention_backend",
        "A backend with another builder is a class of its own.",
        (
            StoryStep(
                "The new class is named after the old one and answers as it does, except when"
                " it is asked for its builder.",
                "(mine.__name__ == 'My' + backend.__name__, mine.get_name() == backend.get_name())",
                "(True, True)",
            ),
        ),
    ),
    Example(
        "subclass_attention_metadata",
        "Metadata with one field more is a class of its own too.",
        (
            StoryStep(
                "It has every field of the old class, in the same order, and the new one last.",
                "list(counted.__dataclass_fields__)[-1]",
                "'num_images'",
            ),
        ),
    ),
    Example(
        "create_fast_prefill_custom_backend",
        "A backend for the layers that run only on tokens whose logits are wanted.",
        (
            StoryStep(
                "The metadata says which tokens of the whole step are the queries.",
                "list(fast.get_metadata_cls().__dataclass_fields__)[-2:]",
                "['logits_indices_padded', 'num_logits_indices']",
                step="add two fields to the metadata",
            ),
            StoryStep(
                "The builder selects the wanted tokens and calls the backend's own builder.",
                "issubclass(fast.get_builder_cls(), BACKENDS[0].get_builder_cls())",
                "True",
                step="build the metadata from the wanted tokens alone",
            ),
            StoryStep(
                "Everything else is the backend's: its cache, its kernels, its name.",
                "(fast.get_impl_cls() is BACKENDS[0].get_impl_cls(), fast.__name__[:11])",
                "(True, 'FastPrefill')",
                step="derive a backend that returns both classes",
            ),
        ),
    ),
)
