"""The picture of latent_attention."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        720,
        190,
        "What the cache keeps of one token: a latent and one key part, whatever the number"
        " of heads.",
    )
    d.text(20, 43, "kept")
    d.box(110, 20, 384, 34, "latent of keys and values: 512", "a")
    d.box(494, 20, 96, 34, "position: 64", "b")
    d.text(20, 133, "computed")
    for head in range(3):
        x = 110 + head * 200
        d.box(x, 110, 72, 34, "key", "a")
        d.box(x + 72, 110, 36, 34, "", "b")
        d.box(x + 114, 110, 72, 34, "value", "a")
        d.text(x + 93, 166, f"head {head}", "caption")
        d.arrow(302, 58, x + 36, 106)
        d.arrow(542, 58, x + 90, 106)
    return d
