"""How does a concept work, step by step, in the terminal?

The worked examples of `examples.py`, told with a picture and with results that are computed while
you read.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from .examples import Example, example_names, examples_of, run_example
from .operations import CONCEPTS, load_implementation
from .operations import concept as concept_of

Cell = tuple[str, str]
"""What stands in a box, and the style it is written in."""

A, B, NEW, DIM, PLAIN = "cyan", "magenta", "bold green", "dim", ""


def explain(concept: str, console: Console) -> None:
    """Walk through a concept's worked examples on the console.

    Args:
        concept: a name from `operations.CONCEPTS`.
        console: where to print; 80 columns are enough.

    Raises:
        KeyError: no such concept; the message lists what there is.
    """
    topic = concept_of(concept)
    examples = examples_of(concept)
    reference = load_implementation("reference")
    console.print()
    console.print(Panel(Text(topic.question, style="bold"), title=concept, width=80))
    console.print()
    console.print(Padding(Group(*PICTURES[concept]()), (0, 2)))
    for number, example in enumerate(examples, 1):
        console.print()
        heading = Text(f" {number}  {example.operation} ", style="reverse bold")
        console.print(heading)
        console.print(_tell(example, example_names(reference)))
    names = [each.name for each in CONCEPTS]
    following = names[names.index(concept) + 1 :]
    console.print()
    console.print(Text(f"To read on: reference/{concept}.py", style=DIM))
    if following:
        console.print(Text(f"Next:       pagetwin explain {following[0]}", style=DIM))


def _tell(example: Example, names: dict[str, Any]) -> RenderableType:
    parts: list[RenderableType] = [Text(example.title), Text()]
    # the call comes first: the story speaks of its names and numbers
    for source, _, shown in run_example(example, names):
        parts.append(
            Syntax(
                source,
                "python",
                theme="ansi_dark",
                background_color="default",
                word_wrap=True,
            )
        )
        if shown:
            parts.append(Text(shown, style=NEW))
    parts.append(Text())
    story = Table.grid(padding=(0, 1))
    for number, step in enumerate(example.story, 1):
        words = Text()
        if step.step:
            words.append(f"{step.step}: ", style="italic")
        words.append(step.text)
        calculation = Text().append(f"{step.expression}  is  ", style=DIM)
        calculation.append(repr(eval(step.expression, dict(names))), style=NEW)
        story.add_row(f"{number}.", Group(words, calculation))
    parts.append(story)
    return Padding(Group(*parts), (1, 2, 0, 3))


def boxes(cells: Sequence[Cell], width: int = 4) -> list[Text]:
    """Return cells drawn as boxes side by side: three lines."""
    top = "┌" + "┬".join("─" * width for _ in cells) + "┐"
    bottom = "└" + "┴".join("─" * width for _ in cells) + "┘"
    middle = Text().append("│", style=DIM)
    for text, style in cells:
        middle.append(text.center(width), style=style or "default")
        middle.append("│", style=DIM)
    return [Text(top, style=DIM), middle, Text(bottom, style=DIM)]


def under(cells: Sequence[str], width: int = 4) -> Text:
    """Return captions that stand under (or over) such boxes."""
    words = " ".join(text.center(width) for text in cells)
    return Text(f" {words} ", style=DIM)


def beside(*columns: Sequence[Text], gap: int = 2) -> list[Text]:
    """Return drawings of equal height side by side."""
    lines = []
    for row in zip(*columns, strict=True):
        line = Text()
        for number, (text, column) in enumerate(zip(row, columns, strict=True)):
            width = max(len(each.plain) for each in column)
            line.append_text(text)
            last = number == len(columns) - 1
            line.append(" " * (width - len(text.plain) + (0 if last else gap)))
        lines.append(line)
    return lines


def _said(*lines: str) -> list[Text]:
    return [Text(line, style=PLAIN) for line in lines]


def _draw_block_table() -> list[Text]:
    rows = beside(
        [Text(), Text("request 0"), Text(), Text()],
        [*boxes([("7", A), ("2", A), ("", DIM)]), under(["0-3", "4-7", ""])],
        [Text(), Text("request 1"), Text(), Text()],
        [*boxes([("5", B), ("", DIM), ("", DIM)]), under(["0-3", "", ""])],
    )
    owners = {7: ("r0", A, "0-3"), 2: ("r0", A, "4-7"), 5: ("r1", B, "0-3")}
    found = [owners.get(block, ("", DIM, "")) for block in range(8)]
    cache = beside(
        [Text(line) for line in ("block", "", "the cache", "", "positions")],
        [
            under([str(block) for block in range(8)]),
            *boxes([(owner, style) for owner, style, _ in found]),
            under([positions for _, _, positions in found]),
        ],
    )
    return [
        *_said(
            "Each request's row lists its blocks; under them, the positions they hold:"
        ),
        *rows,
        *_said("", "The same blocks where they lie:", ""),
        *cache,
    ]


def _draw_slot_mapping() -> list[Text]:
    row, block_size, first_new = [7, 2, 5], 4, 4
    columns = []
    for entry, block in enumerate(row):
        cells, slots = [], []
        for offset in range(block_size):
            position = entry * block_size + offset
            stored = NEW if position >= first_new else A
            cells.append((f"p{position}", stored) if position < 10 else ("", DIM))
            slots.append(str(block * block_size + offset))
        title = Text(f"entry {entry}: block {block}", style=A)
        columns.append([title, *boxes(cells), under(slots)])
    return [
        *_said(
            "The row 7, 2, 5 of one sequence. In the boxes its positions; under them"
        ),
        *_said("the slots they get. Positions 4 to 9 are stored in this step:", ""),
        *beside(*columns),
    ]


def _draw_kv_cache() -> list[Text]:
    raw = boxes([("327,680 bytes, taken once", PLAIN)], width=59)
    halves = boxes([("keys", A), ("values", B)], width=29)
    blocks = boxes([*[("", A)] * 10, *[("", B)] * 10], width=2)
    numbers = Text(" ".join(f"{block:2}" for block in [*range(10)] * 2), style=DIM)
    numbers = Text(" ").append_text(numbers)
    return [
        *raw,
        *halves,
        *blocks,
        numbers,
        *_said("", "One block of keys: 16 slots. One slot: 8 heads of 64 elements."),
    ]


def _draw_cache_ops() -> list[Text]:
    tokens = beside(
        [Text(), Text("new keys"), Text(), Text("slots")],
        [*boxes([("5", NEW), ("6", DIM)]), under(["9", "-1"])],
    )
    columns = []
    for block in range(3):
        slots = range(block * 4, block * 4 + 4)
        cells = [("5", NEW) if slot == 9 else ("", DIM) for slot in slots]
        columns.append(
            [
                Text(f"block {block}"),
                *boxes(cells),
                under([str(slot) for slot in slots]),
            ]
        )
    return [
        *tokens,
        *_said("", "Slot 9 is offset 1 of block 2; slot -1 is nowhere:", ""),
        *beside(*columns),
    ]


def _draw_batch_split() -> list[Text]:
    def batch(order: Sequence[int]) -> list[Text]:
        tokens = [6, 1, 7, 1]
        cells = [(f"{tokens[each]}", NEW if tokens[each] == 1 else B) for each in order]
        requests = under([f"r{each}" for each in order], width=6)
        return [*boxes(cells, width=6), requests]

    return [
        *_said(
            "New tokens of requests r0 to r3, as they came and with decodes first:", ""
        ),
        *beside(
            batch([0, 1, 2, 3]),
            [Text(), Text("one swap ->"), Text(), Text()],
            batch([3, 1, 2, 0]),
        ),
        *_said(" " * 45 + "decodes".center(13) + "|" + "prefills".center(13)),
    ]


def _draw_metadata() -> list[Text]:
    cells = [("r0", A), ("r1", B), ("r1", B), ("r1", B)]
    batch = beside(
        [
            Text("token"),
            Text(),
            Text("request"),
            Text(),
            Text("position"),
            Text("slot"),
        ],
        [
            under(["0", "1", "2", "3"]),
            *boxes(cells),
            under(["4", "0", "1", "2"]),
            under(["8", "20", "21", "22"]),
        ],
    )
    return [
        *_said("The new tokens of all requests lie in one flat batch:", ""),
        *batch,
        *_said(
            "",
            "query_start_loc  0, 1, 4   where each request starts, and the end",
            "seq_lens         5, 3      keys of each sequence after this step",
        ),
    ]


def _draw_paged_attention() -> list[Text]:
    values = [[0, 1], [2, 3], [4, 5]]
    cache = beside(
        *(
            [
                Text(f"block {block}"),
                *boxes([(str(each), A if block == 2 else DIM) for each in pair]),
            ]
            for block, pair in enumerate(values)
        )
    )
    views = [
        [Text(), Text("token 0 sees"), Text()],
        boxes([("4", NEW), ("x", DIM)]),
        [Text(), Text("-> 4", style=NEW), Text()],
        [Text(), Text("  token 1 sees"), Text()],
        boxes([("4", NEW), ("5", NEW)]),
        [Text(), Text("-> 4.5", style=NEW), Text()],
    ]
    return [
        *_said("The values in the cache; the sequence's row says block 2:", ""),
        *cache,
        *_said(""),
        *beside(*views),
    ]


def _draw_backend() -> list[Text]:
    flow = beside(
        boxes([("write the new keys", A)], width=20),
        [Text(), Text("->"), Text()],
        boxes([("attend: decodes", NEW)], width=17),
        [Text(), Text("->"), Text()],
        boxes([("attend: prefills", B)], width=18),
        gap=1,
    )
    values = [("", DIM), ("", DIM), ("30", NEW), ("", DIM)]
    values += [("4", B), ("7", B), ("10", A), ("20", A)]
    columns = [
        [Text(f"block {block}"), *boxes(values[2 * block : 2 * block + 2])]
        for block in range(4)
    ]
    return [
        *_said("A layer's step:", ""),
        *flow,
        *_said(
            "",
            "The values in the cache after the write; request 0 owns blocks 3 and 1,",
        ),
        *_said("request 1 owns block 2:", ""),
        *beside(*columns),
    ]


PICTURES: dict[str, Callable[[], list[Text]]] = {
    "block_table": _draw_block_table,
    "slot_mapping": _draw_slot_mapping,
    "kv_cache": _draw_kv_cache,
    "cache_ops": _draw_cache_ops,
    "batch_split": _draw_batch_split,
    "metadata": _draw_metadata,
    "paged_attention": _draw_paged_attention,
    "backend": _draw_backend,
}
