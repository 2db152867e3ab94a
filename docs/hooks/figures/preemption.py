"""The picture of preemption: four blocks after each step of two requests, by the scheduler."""

from pagetwin.reference import BlockManager, Request, Scheduler

from .drawing import Cell, Drawing

NUM_BLOCKS, BLOCK_SIZE = 4, 2
PROMPTS = {"a": [1, 2, 3], "b": [4, 5, 6]}


def frames() -> list[tuple[str, str, list[Cell]]]:
    """Return step, explanation, and the cell of each slot, step by step."""
    blocks = BlockManager(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    scheduler = Scheduler(blocks, token_budget=8, max_running=8)
    for name, prompt in PROMPTS.items():
        scheduler.add_request(Request(name, prompt, max_tokens=4))
    found = []
    for number, words in enumerate(
        (
            "both prompts: each takes 2 blocks",
            "each has one empty slot left",
            "a needs a third block: b is preempted",
        ),
        1,
    ):
        step = scheduler.schedule()
        cells: list[Cell] = [("", "off")] * (NUM_BLOCKS * BLOCK_SIZE)
        for part in step.scheduled_requests:
            name, first = str(part.request.request_id), part.num_computed_tokens
            for position in range(first + part.num_scheduled_tokens):
                block = part.block_ids[position // BLOCK_SIZE]
                slot = block * BLOCK_SIZE + position % BLOCK_SIZE
                mark = " mark" if position >= first else ""
                cells[slot] = f"{name}{position}", f"{name}{mark}"
        found.append((f"step {number}", words, cells))
        scheduler.update_from_output(step, dict.fromkeys(step.num_scheduled_tokens, 7))
    return found


def draw() -> Drawing:
    d = _drawing(760, 196)
    for row, (step, words, cells) in enumerate(frames()):
        y = 34 + row * 56
        d.text(12, y + 15, step, "head")
        d.text(12, y + 32, words, "note")
        _blocks(d, 330, y, 46, cells)
    _names(d, 330, 46)
    return d


def draw_narrow() -> Drawing:
    d = _drawing(340, 300)
    for row, (step, words, cells) in enumerate(frames()):
        y = 34 + row * 90
        d.text(6, y + 14, step, "head")
        d.text(56, y + 14, words, "note")
        _blocks(d, 6, y + 24, 38, cells)
    _names(d, 6, 38)
    return d


def _blocks(d: Drawing, left: float, y: float, slot: int, cells: list[Cell]) -> None:
    for number, (words, kind) in enumerate(cells):
        x = left + number * slot + number // BLOCK_SIZE * 8
        d.box(x, y, slot, 34, words, kind)


def _names(d: Drawing, left: float, slot: int) -> None:
    for block in range(NUM_BLOCKS):
        x = left + block * (BLOCK_SIZE * slot + 8) + slot
        d.text(x, 22, f"block {block}", "caption")


def _drawing(width: int, height: int) -> Drawing:
    shown = "; ".join(
        f"{step}: {words}, slots {', '.join(cell or 'empty' for cell, _ in cells)}"
        for step, words, cells in frames()
    )
    return Drawing(
        width,
        height,
        "Four blocks of two slots in the three steps of the code below. a0 is the token of request"
        " a at position 0. A bold outline: computed in this step.",
        f"The slots of four blocks after each of three steps. {shown}.",
    )
