"""The picture of one_step: a decode and a prefill chunk in one batch, with all its tensors."""

from typing import NamedTuple

from pagetwin.reference import compute_slot_mapping_batch

from .drawing import Drawing

BLOCK_SIZE = 4
NUM_BLOCKS = 6
NEW, CONTEXT = (1, 3), (5, 2)
TABLE = ((4, 1), (2, 5))
KINDS = ("a", "b")


class Layout(NamedTuple):
    """Sizes of the figure: of the whole, and of its parts.

    Args:
        left, cell: Left edge of the tensors, and width of an entry.
        pitch: Distance of two tensors.
        note: Left edge of a tensor's explanation, and its distance below the tensor's text.
        slot: Width of a slot of the cache.
        blocks: Blocks of the cache in one line.
        key: Width of a key of an output row.
    """

    width: int
    height: int
    margin: int
    left: int
    cell: int
    pitch: int
    note: tuple[int, int]
    slot: int
    blocks: int
    key: int


WIDE = Layout(760, 584, 12, 180, 56, 42, (424, 0), 27, 6, 30)
NARROW = Layout(340, 790, 6, 132, 50, 58, (6, 30), 25, 3, 24)


def slots() -> list[int]:
    """Return the slot of every new token."""
    found: list[int] = compute_slot_mapping_batch(
        list(NEW), list(CONTEXT), [list(row) for row in TABLE], block_size=BLOCK_SIZE
    ).tolist()
    return found


def tokens() -> list[tuple[int, int]]:
    """Return request and position of every new token, in batch order."""
    return [
        (req, CONTEXT[req] + number)
        for req in range(len(NEW))
        for number in range(NEW[req])
    ]


def draw() -> Drawing:
    return _draw(WIDE)


def draw_narrow() -> Drawing:
    return _draw(NARROW)


def _draw(sizes: Layout) -> Drawing:
    batch = tokens()
    kinds = [KINDS[req] for req, _ in batch]
    starts = [sum(NEW[:req]) for req in range(len(NEW) + 1)]
    lengths = [c + n for c, n in zip(CONTEXT, NEW, strict=True)]
    d = Drawing(
        sizes.width,
        sizes.height,
        "One step with two requests: request a decodes its token at position 5, request b computes"
        " the tokens at positions 2 to 4 of its prompt. Blocks have 4 slots. A bold outline: new in"
        " this step.",
        f"The batch of one step and its tensors: slot_mapping {slots()}, query_start_loc"
        f" {starts}, seq_lens {lengths}, block_table {[list(row) for row in TABLE]}. Below, the"
        " KV cache after the write, with the four new tokens at these slots. Below that, four"
        " output rows: each attends to the keys of its own request up to its own position.",
    )
    lines: tuple[tuple[str, str, list[object], list[str]], ...] = (
        (
            "new tokens",
            "the batch: one of request a, three of b",
            [f"{'ab'[r]}{p}" for r, p in batch],
            [f"{kind} mark" for kind in kinds],
        ),
        (
            "positions",
            "not passed: the last ones of each sequence",
            [p for _, p in batch],
            kinds,
        ),
        ("slot_mapping", "where each token is written", list(slots()), kinds),
        (
            "query_start_loc",
            "first new token of each request, and the end",
            list(starts),
            ["a", "b", "off"],
        ),
        (
            "seq_lens",
            "keys of each request, the new ones included",
            list(lengths),
            list(KINDS),
        ),
    )
    for row, (name, words, values, colours) in enumerate(lines):
        y = 22 + row * sizes.pitch
        cells = [(str(v), k) for v, k in zip(values, colours, strict=True)]
        d.text(sizes.margin, y + 21, name, "head")
        d.row(sizes.left, y, cells, w=sizes.cell, h=30)
        d.text(sizes.note[0], y + 20 + sizes.note[1], words, "note")
    y = 22 + len(lines) * sizes.pitch
    d.text(sizes.margin, y + 21, "block_table", "head")
    for req, entries in enumerate(TABLE):
        cells = [(str(block), KINDS[req]) for block in entries]
        d.row(sizes.left, y + req * 32, cells, w=sizes.cell, h=30)
    words = "position p is in block [p // 4], offset p % 4"
    d.text(sizes.note[0], y + 20 + 2.4 * sizes.note[1], words, "note")
    y = _cache(d, sizes, y + 118 + sizes.note[1])
    _outputs(d, sizes, y)
    return d


def _cache(d: Drawing, sizes: Layout, y: float) -> float:
    """Draw the cache after the write; what this step wrote has its slot number below.

    Returns: the place of what comes below.
    """
    d.text(sizes.margin, y - 24, "KV cache after the write", "head")
    written = dict(zip(slots(), tokens(), strict=True))
    for block in range(NUM_BLOCKS):
        line, column = divmod(block, sizes.blocks)
        x = sizes.margin + column * (BLOCK_SIZE * sizes.slot + 10)
        top = y + line * 76
        d.text(x + 2 * sizes.slot, top - 4, f"block {block}", "caption")
        for offset in range(BLOCK_SIZE):
            slot = block * BLOCK_SIZE + offset
            words, kind = "", "off"
            for req, row in enumerate(TABLE):
                if block in row:
                    position = row.index(block) * BLOCK_SIZE + offset
                    if position < CONTEXT[req] + NEW[req]:
                        words, kind = f"{'ab'[req]}{position}", KINDS[req]
            left = x + offset * sizes.slot
            kind = f"{kind} mark" if slot in written else kind
            d.box(left, top, sizes.slot, 30, words, kind)
            if slot in written:
                d.text(left + sizes.slot / 2, top + 47, str(slot), "caption")
    words = "below a new token: its slot"
    d.text(sizes.margin, top + 70, words, "note")
    return top + 124


def _outputs(d: Drawing, sizes: Layout, y: float) -> None:
    """Draw the output rows, and the keys that each attends to."""
    d.text(sizes.margin, y - 16, "output rows, and the keys they attend to", "head")
    for row, (req, position) in enumerate(tokens()):
        top = y + row * 27
        x = sizes.margin + 20
        d.text(sizes.margin, top + 17, f"{row}", "note")
        d.box(x, top, sizes.cell, 24, f"{'ab'[req]}{position}", f"{KINDS[req]} mark")
        x += sizes.cell + 14
        for key in range(CONTEXT[req] + NEW[req]):
            visible = key <= position
            colour = KINDS[req] if visible else "off"
            d.box(x + key * sizes.key, top, sizes.key - 3, 24, "", colour)
        x += 6 * sizes.key + 12
        d.text(x, top + 17, f"keys 0 to {position} of {'ab'[req]}", "note")
