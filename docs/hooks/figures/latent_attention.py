"""The picture of latent_attention."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        720,
        330,
        "What the cache stores per token: a latent and the rope part of the key, "
        "whatever the number of heads. A prefill expands them to all heads. A decode "
        "projects its query instead.",
    )
    d.text(20, 43, "cached")
    d.box(110, 20, 384, 34, "latent of keys and values: 512", "a")
    d.box(494, 20, 96, 34, "position: 64", "b")
    d.text(20, 133, "prefill")
    for head in range(3):
        x = 110 + head * 200
        d.box(x, 110, 72, 34, "key", "a")
        d.box(x + 72, 110, 36, 34, "", "b")
        d.box(x + 114, 110, 72, 34, "value", "a")
        d.text(x + 93, 166, f"head {head}", "caption")
        d.arrow(302, 58, x + 36, 106)
        d.arrow(542, 58, x + 90, 106)
    d.text(20, 223, "decode")
    d.box(110, 200, 384, 34, "one head's query * w_uk: 512", "new")
    d.box(494, 200, 96, 34, "query: 64", "new")
    d.text(600, 223, "reads the cache")
    d.text(20, 293, "its result")
    d.box(110, 270, 384, 34, "mean of the latents: 512", "a")
    d.arrow(498, 287, 546, 287)
    d.box(550, 270, 110, 34, "* w_uv: value", "new")
    return d
