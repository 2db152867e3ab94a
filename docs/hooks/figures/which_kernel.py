"""The picture of which_kernel: how a call of attention gets to its kernel family, as a tree."""

from .drawing import Drawing

TREE: tuple[tuple[int, str, str], ...] = (
    (0, "a call of attention", "off"),
    (1, "with a shared prefix", "off"),
    (2, "sm90 prefix", "b"),
    (2, "portable prefix", "a"),
    (1, "without one", "off"),
    (2, "latent decodes: sm90 latent", "b"),
    (2, "other latents: portable latent", "a"),
    (2, "batch_invariant: sm90 invariant", "b"),
    (2, "all requests short", "off"),
    (3, "sm90 code decode", "b"),
    (3, "portable decode", "a"),
    (2, "a long one: the shorter estimate", "off"),
    (3, "one launch for all requests", "off"),
    (4, "sm90 append", "b"),
    (4, "portable append", "a"),
    (3, "short ones as above, and long ones", "off"),
    (4, "sm90 prefill", "b"),
    (4, "sm90 code prefill", "b"),
    (4, "portable prefill", "a"),
)
"""Depth, words and class of each node: a condition, a portable family or one for Hopper."""
LINE = 38


def draw() -> Drawing:
    return _draw(760, 12, step=60, width=300)


def draw_narrow() -> Drawing:
    return _draw(340, 4, step=20, width=252)


def _draw(size: int, margin: int, step: int, width: int) -> Drawing:
    words = "; ".join(f"{'- ' * depth}{name}" for depth, name, _ in TREE)
    d = Drawing(
        size,
        LINE * len(TREE) + 60,
        "From top to bottom: the first family that takes the call computes it. A call that a family"
        " for Hopper does not take goes on to the rows below it. With a long request the time of"
        " one launch and of two is estimated, and the shorter one runs. Orange: for Hopper (sm90)."
        " Blue: for every chip.",
        f"A tree of conditions whose leaves are kernel families: {words}.",
    )
    for row, (depth, name, kind) in enumerate(TREE):
        x, y = margin + depth * step, 8 + row * LINE
        if depth:
            parent = max(above for above in range(row) if TREE[above][0] == depth - 1)
            stem, top = x - step + min(step, 40) / 2, 8 + parent * LINE + 28
            d.parts.append(
                f'<path d="M{stem} {top} L{stem} {y + 14} L{x} {y + 14}" class="branch"/>'
            )
        d.box(x, y, width, 28, name, kind)
    y = 8 + LINE * len(TREE) + 6
    for x, kind, label in (
        (margin, "b", "for Hopper"),
        (margin + 130, "a", "portable"),
    ):
        d.box(x, y, 18, 18, "", kind)
        d.text(x + 26, y + 14, label, "note")
    return d
