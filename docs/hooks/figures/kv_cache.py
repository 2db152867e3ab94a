"""The picture of kv_cache."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        720,
        296,
        "One layer's cache of ten blocks: raw bytes, two halves, blocks, slots.",
    )
    d.text(20, 42, "bytes")
    d.box(110, 20, 600, 34, "327,680 bytes (int8), allocated once", "off")
    d.text(20, 102, "halves")
    d.row(110, 80, [("keys", "a"), ("values", "b")], w=300)
    d.text(20, 162, "blocks")
    d.row(110, 140, [(str(n), "a") for n in range(10)], w=30)
    d.row(410, 140, [(str(n), "b") for n in range(10)], w=30)
    d.text(20, 222, "slots")
    d.row(110, 200, [(str(n), "new") for n in range(16)], w=37.5)
    d.arrow(110 + 6.5 * 30, 176, 110 + 6.5 * 30, 197)
    d.text(330, 192, "one block: 16 slots", "note")
    d.text(20, 277, "elements")
    d.row(110, 255, [(f"head {n}: 64", "new") for n in range(8)], w=75)
    d.arrow(110 + 4.5 * 37.5, 236, 110 + 4.5 * 37.5, 252)
    d.text(330, 249, "one slot: one token's key, 8 heads", "note")
    return d
