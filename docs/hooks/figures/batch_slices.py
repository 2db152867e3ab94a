"""The picture of batch_slices."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        700,
        236,
        "A step of two requests, divided after its second token. The boundary is "
        "inside request 0.",
    )
    w, x, right = 60, 150, 450
    d.text(20, 43, "the step")
    d.row(x, 20, [("r0", "a"), ("r0", "a"), ("r0", "a"), ("r1", "b")], w=w)
    d.captions(x, 72, ["pos. 0", 1, 2, 4], w=w)
    cut = x + 2 * w
    d.parts.append(f'<path d="M{cut} 12 L{cut} 84" class="cut"/>')
    d.arrow(x + w, 84, x + w, 106)
    d.arrow(x + 3 * w, 84, right + w, 106)
    d.text(20, 135, "micro-batches")
    d.row(x, 112, [("r0", "a"), ("r0", "a")], w=w)
    d.row(right, 112, [("r0", "a"), ("r1", "b")], w=w)
    for y, name, first, second in (
        (172, "query_start_loc", "0, 2", "0, 1, 2"),
        (196, "seq_lens", "2: ends here in this slice", "3, 5"),
        (220, "computed", "0", "2: computed by the first slice; 4"),
    ):
        d.text(20, y, name)
        d.text(x, y, first, "note")
        d.text(right, y, second, "note")
    return d
