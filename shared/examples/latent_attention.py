"""The worked examples and the picture of latent_attention."""

from rich.text import Text

from .drawing import NEW, A, B, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    return [
        *said("What the cache stores per token, for any number of heads:"),
        *boxes([("latent of keys and values", A), ("key with position", B)], width=28),
        under(["512", "64"], width=28),
        *said("", "What 128 heads would store without compression:"),
        *boxes(
            [("128 keys", NEW), ("128 values", NEW)],
            width=28,
        ),
        under(["128 * (128 + 64)", "128 * 128"], width=28),
    ]


EXAMPLES = (
    Example(
        "get_mla_dims",
        "The widths of a model whose queries are not compressed.",
        (
            StoryStep(
                "Keys and values of all heads are computed from a latent of 512; one key part"
                " of 64 carries the position. That is all the cache stores per token.",
                "512 + 64",
                "576",
            ),
            StoryStep(
                "128 heads with their own keys of 128 + 64 and values of 128 would store 71"
                " times as much.",
                "128 * (128 + 64 + 128) // 576",
                "71",
            ),
        ),
    ),
    Example(
        "concat_and_cache_mla",
        "Token 0 goes to slot 3, token 1 nowhere.",
        (
            StoryStep(
                "The slots are 3 and -1. Token 1 has a negative one: it is not stored.",
                "[slot < 0 for slot in (3, -1)]",
                "[False, True]",
                step="skip tokens without a slot",
            ),
            StoryStep(
                "Blocks have 2 slots, so slot 3 is offset 1 of block 1.",
                "divmod(3, 2)",
                "(1, 1)",
                step="find block and offset",
            ),
            StoryStep(
                "The latent 1, 2 is stored there, followed by the rope key 5.",
                "kv_cache[1, 1].tolist()",
                "[1.0, 2.0, 5.0]",
                step="store the latent and the rope key",
            ),
        ),
    ),
    Example(
        "gather_latent_cache",
        "A sequence of three tokens, read back from blocks 1 and 0.",
        (
            StoryStep(
                "Positions 0 and 1 belong to entry 0 of the row, block 1; position 2 to entry 1,"
                " block 0. This cache stores elements as they are; codes would be multiplied by"
                " scales.",
                "[[1, 0][position // 2] for position in range(3)]",
                "[1, 1, 0]",
                step="gather the latents and rope keys of all sequences as numbers",
            ),
            StoryStep(
                "The sequence has three tokens, so no row is left.",
                "latents.tolist()",
                "[[2.0, 20.0], [4.0, 40.0], [6.0, 60.0]]",
                step="write them, and zeros after the last sequence",
            ),
        ),
    ),
    Example(
        "latent_decode_attention",
        "A query in the space of the latents: a quarter of 8 and three quarters of 4.",
        (
            StoryStep(
                "The query 1.0986 has one element, the latents have two. w_uk makes a key of"
                " a latent's second element, so the query goes there; its rope part, 0,"
                " follows.",
                "[round(math.log(3) * weight, 4) for weight in (0, 1)] + [0.0]",
                "[0.0, 1.0986, 0.0]",
                step="project the queries into the latent space",
            ),
            StoryStep(
                "Against the cached rows 8, 0, 9 and 4, 1, 9 it scores 0 and 1.0986: weights"
                " 1/4 and 3/4. The mean is taken of the latents, without the rope keys.",
                "[0.25 * 8 + 0.75 * 4, 0.25 * 0 + 0.75 * 1]",
                "[5.0, 0.75]",
                step="attend to the latents as the keys and values of one head",
            ),
            StoryStep(
                "w_uv makes a value of a latent's first element.",
                "5.0 * 1 + 0.75 * 0",
                "5.0",
                step="expand each head's average latent to its value",
            ),
        ),
    ),
    Example(
        "latent_prefill_attention",
        "The same, with keys and values expanded first: one cached token, one new.",
        (
            StoryStep(
                "The new token's latent 4, 1 becomes the key 1, followed by the rope key 9,"
                " and the value 4.",
                "[[4 * 0 + 1 * 1, 9], [4 * 1 + 1 * 0]]",
                "[[1, 9], [4]]",
                step="expand the new tokens' latents to keys and values",
            ),
            StoryStep(
                "The query 1.0986, 0 attends to itself alone: the result is 4, the weight"
                " e^1.0986.",
                "round(math.exp(1 * math.log(3)), 4)",
                "3.0",
                step="attend to the new tokens with a causal mask",
            ),
            StoryStep(
                "One token came before: what slot 0 holds.",
                "[8.0, 0.0, 9.0][:2]",
                "[8.0, 0.0]",
                step="gather the next chunk of the context",
            ),
            StoryStep(
                "Its key is 0, with the rope key 9; its value is 8.",
                "[[8 * 0 + 0 * 1, 9], [8 * 1 + 0 * 0]]",
                "[[0, 9], [8]]",
                step="expand the chunk's latents to keys and values",
            ),
            StoryStep(
                "The query attends to all of the context: the result is 8, the weight e^0.",
                "math.exp(0 * math.log(3))",
                "1.0",
                step="attend to the whole chunk",
            ),
            StoryStep(
                "Weights 1 and 3: a quarter of 8 and three quarters of 4.",
                "1 / 4 * 8 + 3 / 4 * 4",
                "5.0",
                step="merge its result with the results so far",
            ),
        ),
    ),
)
