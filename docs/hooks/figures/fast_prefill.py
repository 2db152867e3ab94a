"""The picture of fast_prefill."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        700,
        210,
        "Of 15 and 5 new tokens, the last layers compute only those whose logits are "
        "wanted: tokens 14, 18 and 19.",
    )
    size, wanted = 27, (14, 18, 19)
    d.text(20, 48, "first layers")
    for token in range(20):
        kind = "new" if token in wanted else "a" if token < 15 else "b"
        d.box(130 + token * size, 26, size, 34, str(token), kind)
    d.text(130 + 7.5 * size, 78, "r0", "caption")
    d.text(130 + 17.5 * size, 78, "r1", "caption")
    d.text(20, 158, "last layers")
    for place, token in enumerate(wanted):
        x = 130 + (14 + 1.5 * place) * size
        d.box(x, 136, size, 34, str(token), "new")
        d.arrow(130 + (token + 0.5) * size, 62, x + size / 2, 132)
    d.text(130, 158, "query_start_loc 0, 1, 3; seq_lens 15, 13")
    return d
