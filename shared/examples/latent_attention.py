"""The worked examples and the picture of latent_attention."""

from rich.text import Text

from .drawing import NEW, A, B, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    return [
        *said("What the cache keeps of one token, whatever the number of heads:"),
        *boxes([("latent of keys and values", A), ("key with position", B)], width=28),
        under(["512", "64"], width=28),
        *said("", "What 128 heads would keep without compression:"),
        *boxes(
            [("128 keys", NEW), ("128 values", NEW)],
            width=28,
        ),
        under(["128 * (128 + 64)", "128 * 128"], width=28),
    ]


EXAMPLES = (
    Example(
        "latent_attention",
        "get_mla_dims",
        "The widths of a model whose queries are not compressed.",
        """\
>>> from types import SimpleNamespace
>>> get_mla_dims(SimpleNamespace(
...     kv_lora_rank=512,
...     qk_nope_head_dim=128,
...     qk_rope_head_dim=64,
...     v_head_dim=128,
... )).cached_width
576
""",
        (
            StoryStep(
                "Keys and values of all heads are computed from a latent of 512; one key part"
                " of 64 carries the position. That is all the cache keeps of a token.",
                "512 + 64",
                "576",
            ),
            StoryStep(
                "128 heads that keep their own keys of 128 + 64 and values of 128 would keep 71"
                " times as much.",
                "128 * (128 + 64 + 128) // 576",
                "71",
            ),
        ),
    ),
)
