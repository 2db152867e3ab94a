"""The picture of index: two sequences, their block-table rows, and the cache that both share."""

from .drawing import Drawing

ROWS = (
    ("request a, 9 tokens", "a", (4, 1, 6), 9),
    ("request b, 6 tokens", "b", (2, 5), 6),
)
BLOCK_SIZE = 4
CELL, GAP = 22, 12


def draw() -> Drawing:
    d = Drawing(
        732,
        252,
        "A row of the block table lists the blocks of a sequence, in the order of its tokens. A"
        " block can be anywhere in the cache. At most one block per request is partly empty.",
    )
    owner = {
        block: (kind, tokens - entry * BLOCK_SIZE)
        for _, kind, blocks, tokens in ROWS
        for entry, block in enumerate(blocks)
    }
    for column, (name, kind, blocks, _) in enumerate(ROWS):
        x = 60 + column * 380
        d.text(x, 26, name)
        d.text(x, 46, "block table:", "note")
        d.row(x + 88, 32, [(str(block), kind) for block in blocks], w=40, h=30)
        for entry, block in enumerate(blocks):
            centre = _block_x(block) + BLOCK_SIZE * CELL / 2
            d.arrow(x + 88 + (entry + 0.5) * 40, 64, centre, 148)
    for block in range(7):
        x = _block_x(block)
        d.text(x + BLOCK_SIZE * CELL / 2, 166, f"block {block}", "caption")
        kind, tokens = owner.get(block, ("off", 0))
        for slot in range(BLOCK_SIZE):
            used = slot < tokens
            d.box(x + slot * CELL, 174, CELL, 34, "", kind if used else "off")
    d.text(20, 234, "KV cache: one slot per token, four slots per block", "note")
    return d


def _block_x(block: int) -> float:
    return 20 + block * (BLOCK_SIZE * CELL + GAP)
