"""The picture of one_step: a decode and a prefill chunk in one batch, with all its tensors."""

from pagetwin.reference import compute_slot_mapping_batch

from .drawing import Drawing

BLOCK_SIZE = 4
NUM_BLOCKS = 6
NEW, CONTEXT = (1, 3), (5, 2)
TABLE = ((4, 1), (2, 5))
KINDS = ("a", "b")
CELL, LEFT = 56, 190
SLOT, GAP = 26, 10


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
    d = Drawing(
        760,
        560,
        "One step with two requests: request a decodes its token at position 5, request b computes"
        " the tokens at positions 2 to 4 of its prompt. Blocks have 4 slots.",
    )
    batch = tokens()
    kinds = [KINDS[req] for req, _ in batch]
    starts = [sum(NEW[:req]) for req in range(len(NEW) + 1)]
    lines: tuple[tuple[str, str, list[object], list[str]], ...] = (
        (
            "tokens of the step",
            "",
            [f"a{p}" if r == 0 else f"b{p}" for r, p in batch],
            kinds,
        ),
        ("positions", "", [p for _, p in batch], kinds),
        ("slot_mapping", "where each token is written", list(slots()), kinds),
    )
    for row, (name, words, values, colours) in enumerate(lines):
        y = 22 + row * 42
        d.text(20, y + 21, name)
        d.row(
            LEFT,
            y,
            [(str(v), k) for v, k in zip(values, colours, strict=True)],
            w=CELL,
            h=30,
        )
        d.text(LEFT + 4 * CELL + 16, y + 20, words, "note")
    for name, words, values, colours, y in (
        (
            "query_start_loc",
            "request r has rows [r] to [r + 1]",
            starts,
            ["a", "b", "off"],
            148,
        ),
        (
            "seq_lens",
            "keys of each request, the new ones included",
            [c + n for c, n in zip(CONTEXT, NEW, strict=True)],
            list(KINDS),
            190,
        ),
    ):
        d.text(20, y + 21, name)
        d.row(
            LEFT,
            y,
            [(str(v), k) for v, k in zip(values, colours, strict=True)],
            w=CELL,
            h=30,
        )
        d.text(LEFT + 4 * CELL + 16, y + 20, words, "note")
    d.text(20, 253, "block_table")
    for req, row in enumerate(TABLE):
        d.row(LEFT, 232 + req * 32, [(str(b), KINDS[req]) for b in row], w=CELL, h=30)
    d.text(
        LEFT + 4 * CELL + 16, 252, "position p is in block [p // 4], slot p % 4", "note"
    )
    _cache(d, 350)
    _outputs(d, 460)
    return d


def _cache(d: Drawing, y: float) -> None:
    """Draw the cache after the write; what this step wrote has its slot number below."""
    d.text(20, y - 22, "KV cache after the write")
    written = dict(zip(slots(), tokens(), strict=True))
    for block in range(NUM_BLOCKS):
        x = 20 + block * (BLOCK_SIZE * SLOT + GAP)
        d.text(x + 2 * SLOT, y - 4, f"block {block}", "caption")
        for offset in range(BLOCK_SIZE):
            slot = block * BLOCK_SIZE + offset
            words, kind = "", "off"
            for req, row in enumerate(TABLE):
                if block in row:
                    position = row.index(block) * BLOCK_SIZE + offset
                    if position < CONTEXT[req] + NEW[req]:
                        words, kind = f"{'ab'[req]}{position}", KINDS[req]
            d.box(
                x + offset * SLOT,
                y,
                SLOT,
                30,
                words,
                "new" if slot in written else kind,
            )
            if slot in written:
                d.text(x + (offset + 0.5) * SLOT, y + 46, str(slot), "caption")


def _outputs(d: Drawing, y: float) -> None:
    """Draw the output rows, and the keys that each attends to."""
    d.text(20, y - 16, "output rows, and the keys that each attends to")
    for row, (req, position) in enumerate(tokens()):
        top = y + row * 24
        d.text(20, top + 15, f"{row}", "note")
        d.box(40, top, CELL, 20, f"{'ab'[req]}{position}", KINDS[req])
        for key in range(CONTEXT[req] + NEW[req]):
            visible = key <= position
            d.box(120 + key * 30, top, 28, 20, "", KINDS[req] if visible else "off")
        d.text(330, top + 15, f"keys 0 to {position} of request {'ab'[req]}", "note")
