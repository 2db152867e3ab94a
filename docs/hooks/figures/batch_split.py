"""The picture of batch_split."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        700,
        212,
        "New tokens of four requests, before and after one swap. The boundary divides "
        "the batch into two slices.",
    )
    counts = [6, 1, 7, 1]
    for y, order, name in (
        (30, [0, 1, 2, 3], "before"),
        (130, [3, 1, 2, 0], "after"),
    ):
        d.text(20, y + 23, name)
        x = 130
        for request in order:
            width = 34 * counts[request]
            kind = "new" if counts[request] == 1 else "b"
            d.box(x, y, width, 36, str(counts[request]), kind)
            d.text(x + width / 2, y + 53, f"r{request}", "caption")
            x += width
    d.arrow(130 + 3 * 34, 88, 130 + 12 * 34, 126)
    d.arrow(130 + 14.5 * 34, 88, 147, 126)
    x = 130 + 2 * 34
    d.parts.append(f'<path d="M{x} 118 L{x} 200" class="cut"/>')
    d.text(x - 6, 206, "2 decodes, 2 tokens", "end")
    d.text(x + 6, 206, "2 prefills, 13 tokens", "label")
    return d
