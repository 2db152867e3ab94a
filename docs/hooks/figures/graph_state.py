"""The picture of graph_state."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        720,
        300,
        "A batch of two in the buffers of a graph captured for four: live rows first, "
        "then harmless values. The graph always reads the same addresses.",
    )
    d.text(20, 43, "batch")
    d.row(150, 20, [("6", "a"), ("9", "b")])
    d.captions(150, 72, ["req 0", "req 1"])
    d.row(420, 20, [("9", "a"), ("32", "b")])
    d.captions(420, 72, ["req 0", "req 1"])
    d.arrow(194, 80, 194, 126)
    d.arrow(464, 80, 464, 126)
    d.text(206, 108, "copy to the front", "note")
    d.text(20, 153, "buffers")
    d.row(150, 130, [("6", "a"), ("9", "b"), ("1", "off"), ("1", "off")])
    d.text(238, 184, "seq_lens_tensor", "caption")
    d.row(420, 130, [("9", "a"), ("32", "b"), ("-1", "off"), ("-1", "off")])
    d.text(508, 184, "slot_mapping", "caption")
    d.arrow(238, 192, 300, 234)
    d.arrow(508, 192, 446, 234)
    d.text(20, 262, "graph of 4")
    d.box(150, 238, 446, 40, "write the new keys, attend: one launch", "new")
    return d
