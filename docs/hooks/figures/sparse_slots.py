"""The picture of sparse_slots."""

from .drawing import Drawing

TOKENS, UNIT = 10, 4


def draw() -> Drawing:
    d = Drawing(
        720,
        330,
        "Ten tokens. Above: groups of four; positions 3 and 7 complete states 0 and 1. "
        "In the middle: position 9 attends to a window of three. Below: a ring of four slots holds "
        "the last four tokens, and positions 8 and 9 are in the slots that 4 and 5 had.",
    )
    ends = [position % UNIT == UNIT - 1 for position in range(TOKENS)]
    d.text(20, 62, "tokens")
    cells = [(f"p{p}", "new" if ends[p] else "a") for p in range(TOKENS)]
    d.row(150, 40, cells, w=52)
    d.text(20, 122, "states")
    for group in range(TOKENS // UNIT):
        d.row(150 + 52 * (UNIT * group + UNIT - 1), 100, [(f"s{group}", "new")], w=52)
    d.text(20, 192, "window of p9")
    seen = [(f"p{p}", "new" if p > 6 else "off") for p in range(TOKENS)]
    d.row(150, 170, seen, w=52)
    d.text(20, 262, "ring")
    holds = sorted(range(TOKENS - UNIT, TOKENS), key=lambda position: position % UNIT)
    d.row(150, 240, [(f"p{p}", "new") for p in holds], w=52)
    d.captions(150, 292, [f"slot {slot}" for slot in range(UNIT)], w=52)
    return d
