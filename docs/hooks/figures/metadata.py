"""The picture of metadata."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        700,
        262,
        "One flat batch: one token of request 0, three of request 1.",
    )
    d.text(20, 43, "new tokens")
    x, w = 170, 70
    d.row(x, 20, [("r0", "a"), ("r1", "b"), ("r1", "b"), ("r1", "b")], w=w)
    d.text(20, 88, "position")
    d.captions(x, 88, [4, 0, 1, 2], w=w)
    d.text(20, 114, "slot_mapping")
    d.captions(x, 114, [8, 20, 21, 22], w=w)
    d.text(20, 140, "query_start_loc")
    for start in (0, 1, 4):
        left = x + start * w
        d.parts.append(f'<path d="M{left} 58 L{left} 124" class="cut"/>')
        d.text(left, 140, str(start), "caption")
    d.text(20, 186, "seq_lens")
    d.row(x, 164, [("5", "a"), ("3", "b")])
    d.text(x + 110, 186, "4 in the cache + 1 new; 0 + 3 new", "note")
    d.text(20, 236, "block table")
    d.row(x, 214, [("7", "a"), ("2", "a")])
    d.row(x + 110, 214, [("5", "b"), ("0", "off")])
    d.text(x + 216, 236, "one row per request", "note")
    return d
