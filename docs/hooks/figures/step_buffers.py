"""The picture of step_buffers."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        700,
        250,
        "Two buffers on the host alternate. The buffer on the device keeps its "
        "address.",
    )
    parts = [("starts", 80), ("lengths", 80), ("slots", 160), ("new blocks", 110)]
    for y, name, kinds in (
        (20, "step 1, host", ("a", "a", "a", "new")),
        (74, "step 2, host", ("b", "b", "b", "new")),
        (170, "device", ("", "", "", "off")),
    ):
        d.text(20, y + 22, name)
        x = 130
        for (words, width), kind in zip(parts, kinds, strict=True):
            d.box(x, y, width, 34, words, kind)
            x += width
    d.arrow(345, 112, 345, 166)
    d.text(360, 144, "one copy of the filled part", "note")
    d.box(590, 74, 90, 130, "", "")
    d.text(635, 130, "block", "caption")
    d.text(635, 148, "table", "caption")
    d.arrow(562, 187, 588, 187)
    d.text(130, 236, "a captured graph reads from here", "note")
    return d
