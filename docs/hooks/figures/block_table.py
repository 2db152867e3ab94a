"""The picture of block_table."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        720,
        232,
        "Request 0 has blocks 7 and 2, request 1 has block 5. Entries past the end of "
        "a row are never read.",
    )
    d.text(20, 58, "block table")
    d.text(130, 24, "request 0: 8 tokens")
    d.row(130, 36, [("7", "a"), ("2", "a"), ("0", "off")])
    d.text(400, 24, "request 1: 4 tokens")
    d.row(400, 36, [("5", "b"), ("0", "off"), ("0", "off")])
    owners = {7: ("0-3", "a"), 2: ("4-7", "a"), 5: ("0-3", "b")}
    d.row(130, 160, [owners.get(n, ("", "off")) for n in range(8)], w=72, h=38)
    d.captions(130, 220, [f"block {n}" for n in range(8)], w=72)
    d.text(20, 184, "the cache,")
    d.text(20, 202, "with positions", "note")
    d.arrow(152, 74, 130 + 7.5 * 72, 156)
    d.arrow(196, 74, 130 + 2.5 * 72, 156)
    d.arrow(422, 74, 130 + 5.5 * 72, 156)
    return d
