"""The picture of index: two sequences, their block-table rows, and the cache that both share."""

from .drawing import Drawing

ROWS = (
    ("request a, 9 tokens", "a", (4, 1, 6), 9),
    ("request b, 6 tokens", "b", (2, 5), 6),
)
BLOCK_SIZE = 4
NUM_BLOCKS = 7
CAPTION = "KV cache: one slot per token, four slots per block"


def draw() -> Drawing:
    d = _drawing(732, 252)
    for column, (name, kind, blocks, _) in enumerate(ROWS):
        x = 60 + column * 380
        d.text(x, 26, name)
        d.text(x, 46, "block table:", "note")
        _table_row(d, x + 88, 40, blocks, kind, left=20, slot=22, gap=12)
    for block in range(NUM_BLOCKS):
        _block(d, block, f"block {block}", left=20, slot=22, gap=12)
    d.text(20, 234, CAPTION, "note")
    return d


def draw_narrow() -> Drawing:
    d = _drawing(340, 252)
    for column, (name, kind, blocks, _) in enumerate(ROWS):
        x = 12 + column * 170
        d.text(x, 20, name)
        _table_row(d, x, 34, blocks, kind, left=12, slot=9, gap=10)
    for block in range(NUM_BLOCKS):
        _block(d, block, str(block), left=12, slot=9, gap=10)
    d.text(12, 234, CAPTION, "note")
    return d


def _drawing(width: int, height: int) -> Drawing:
    return Drawing(
        width,
        height,
        "A row of the block table lists the blocks of a sequence, in the order of its tokens. A"
        " block can be anywhere in the cache. At most one block per request is partly empty.",
    )


def _table_row(
    d: Drawing,
    x: float,
    width: float,
    blocks: tuple[int, ...],
    kind: str,
    *,
    left: float,
    slot: float,
    gap: float,
) -> None:
    """Draw a row of the block table, and an arrow from each entry to its block."""
    d.row(x, 32, [(str(block), kind) for block in blocks], w=width, h=30)
    for entry, block in enumerate(blocks):
        centre = left + block * (BLOCK_SIZE * slot + gap) + BLOCK_SIZE * slot / 2
        d.arrow(x + (entry + 0.5) * width, 64, centre, 148)


def _block(
    d: Drawing, block: int, caption: str, *, left: float, slot: float, gap: float
) -> None:
    """Draw a block of the cache, with the slots that hold tokens in their request's colour."""
    x = left + block * (BLOCK_SIZE * slot + gap)
    d.text(x + BLOCK_SIZE * slot / 2, 166, caption, "caption")
    kind, tokens = "off", 0
    for _, owner, blocks, length in ROWS:
        if block in blocks:
            kind, tokens = owner, length - blocks.index(block) * BLOCK_SIZE
    for offset in range(BLOCK_SIZE):
        colour = kind if offset < tokens else "off"
        d.box(x + offset * slot, 174, slot, 34, "", colour)
