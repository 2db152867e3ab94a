"""The picture of block_life: the state of five blocks after each event, by the block manager."""

from pagetwin.reference import BlockManager

from .drawing import Drawing

NUM_BLOCKS = 5
PROMPT = [7, 8, 7, 9, 7]
LEGEND = (
    ("a", "held by one request"),
    ("b", "held by several"),
    ("new", "cached: known content, no holder"),
    ("off", "free"),
)


def frames() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return event, explanation, and text and class of each block, event by event."""
    manager = BlockManager(num_blocks=NUM_BLOCKS, block_size=2)
    found = []

    def record(event: str, words: str) -> None:
        cached = manager.cached_blocks()
        cells = []
        for block in range(NUM_BLOCKS):
            count = manager.ref_cnt(block)
            if count:
                cells.append((f"{count}", "a" if count == 1 else "b"))
            else:
                cells.append(("cached", "new") if block in cached else ("", "off"))
        found.append((event, words, cells))

    manager.allocate_slots("a", num_computed_tokens=0, num_new_tokens=5)
    record("allocate", "a's prompt of 5 tokens takes 3 blocks")
    manager.cache_full_blocks("a", PROMPT, num_computed_tokens=5)
    record("fill", "blocks 0 and 1 are full: their tokens are known")
    shared = manager.get_computed_blocks([*PROMPT[:4], 6, 6])
    manager.allocate_slots("b", 4, 2, computed_blocks=shared)
    record("share", "b begins with the same 4 tokens")
    manager.fork("a", "c")
    record("fork", "c continues a's sequence")
    manager.allocate_slots("c", num_computed_tokens=5, num_new_tokens=1)
    record("copy on write", "c writes into block 2, which a holds")
    manager.free("b")
    record("preempt", "b's blocks are needed elsewhere")
    manager.free("c")
    manager.free("a")
    record("free", "full blocks stay known until they are needed")
    manager.allocate_slots("d", num_computed_tokens=0, num_new_tokens=8)
    record("evict", "d takes 4 blocks, one of them cached")
    return found


def draw() -> Drawing:
    shown = frames()
    left, cell, pitch = 330, 76, 46
    d = _drawing(760, 70 + pitch * len(shown))
    d.captions(left, 20, [f"block {block}" for block in range(NUM_BLOCKS)], w=cell)
    for row, (event, words, cells) in enumerate(shown):
        y = 28 + row * pitch
        d.text(20, y + 17, event)
        d.text(20, y + 33, words, "note")
        d.row(left, y, cells, w=cell, h=34)
    y = 28 + pitch * len(shown) + 6
    for x, (kind, words) in zip((20, 190, 340, 590), LEGEND, strict=True):
        _legend(d, x, y, kind, words)
    return d


def draw_narrow() -> Drawing:
    shown = frames()
    left, cell, pitch = 8, 66, 80
    d = _drawing(340, 30 + pitch * len(shown) + 104)
    d.captions(left, 20, [f"block {block}" for block in range(NUM_BLOCKS)], w=cell)
    for row, (event, words, cells) in enumerate(shown):
        y = 30 + row * pitch
        d.text(left, y + 16, event)
        d.text(left, y + 32, words, "note")
        d.row(left, y + 38, cells, w=cell, h=30)
    for row, (kind, words) in enumerate(LEGEND):
        _legend(d, left, 30 + pitch * len(shown) + 8 + row * 24, kind, words)
    return d


def _drawing(width: int, height: int) -> Drawing:
    return Drawing(
        width,
        height,
        "Five blocks of two tokens after each event. A number is the reference count: how many"
        " requests hold the block. The states are computed by BlockManager when this page is"
        " built.",
    )


def _legend(d: Drawing, x: float, y: float, kind: str, words: str) -> None:
    d.box(x, y, 18, 18, "", kind)
    d.text(x + 26, y + 14, words, "note")
