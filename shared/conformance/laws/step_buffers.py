"""Laws of step buffers: metadata written into tensors with fixed addresses.

Each case is a history of one engine. Rows gain blocks, are cleared and are assigned to new
requests. Steps grow and shrink, with or without padding to a captured size. The expected values of
every step are computed from a list of rows. The tensors of all steps must have the same addresses,
and must not contain values of an older step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from ...contract.metadata_classes import CommonAttentionMetadata
from ..candidates.setting import Setting
from ..cases.steps import counts, padded, several
from ..checks.expect import Disagreement, expect_rejection, expect_same
from ..checks.metadata import (
    expect_fields,
    expect_rows,
    expect_unchanged,
    remember,
    seen_by,
)
from .law import law

MAX_REQS, MAX_BLOCKS = 5, 6


@dataclass(frozen=True)
class BufferAction:
    """One action on the buffers of an engine: append blocks, clear rows, or build a step.

    Args:
        rows: Rows of the block table. For a step: the row of each request, in order.
        blocks: Block ids that each row gains. If empty, rows are cleared or a step is built.
        new: Optional. New tokens of each request of a step. If None, no step is built.
        computed: Tokens in the cache of each request of a step.
        in_order: Whether the rows of the requests are passed to `build`.
        padding: Optional. Numbers of padding requests and padding tokens. If None, the step is
            not padded.
    """

    rows: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...] = ()
    new: tuple[int, ...] | None = None
    computed: tuple[int, ...] = ()
    in_order: bool = False
    padding: tuple[int, int] | None = None


@dataclass(frozen=True)
class BufferHistory:
    """The sequence of actions on the buffers of one engine.

    Args:
        block_size: Slots per block.
        max_tokens: New tokens of the largest step.
        actions: The actions in order.
    """

    block_size: int
    max_tokens: int
    actions: tuple[BufferAction, ...]


@st.composite
def histories(draw: st.DrawFn) -> BufferHistory:
    """Return a history whose steps end at the edges of rows, and whose rows are reassigned."""
    pick = Random(draw(st.integers(0, 2**20)))
    size = pick.choice([1, 2, 3, 4, 16])
    max_tokens = pick.choice([8, 20, MAX_BLOCKS * size + 3])
    held = [0] * MAX_REQS
    ids = pick.sample(range(1, 2**20), 400)
    ids[-pick.randint(1, 4)] = 0  # block 0 is a block like any other
    actions = []
    for _ in range(pick.choice([3, 6, 10])):
        kind = pick.choice(["append", "step", "step", "step", "clear"])
        if not any(held):
            kind = "append"
        if kind == "append":
            rows = pick.sample(range(MAX_REQS), pick.randint(1, MAX_REQS))
            gains = [
                min(pick.choice([0, 1, 2, 6]), MAX_BLOCKS - held[row]) for row in rows
            ]
            blocks = tuple(tuple(ids.pop() for _ in range(gain)) for gain in gains)
            for row, gain in zip(rows, gains, strict=True):
                held[row] += gain
            actions.append(BufferAction(tuple(rows), blocks))
        elif kind == "clear":
            # several requests may finish at once, and their rows are assigned to new requests
            rows = pick.sample(range(MAX_REQS), pick.choice([1, 2, MAX_REQS]))
            gains = [min(pick.choice([1, 2]), MAX_BLOCKS) for _ in rows]
            blocks = tuple(tuple(ids.pop() for _ in range(gain)) for gain in gains)
            actions += [BufferAction(tuple(rows)), BufferAction(tuple(rows), blocks)]
            for row, gain in zip(rows, gains, strict=True):
                held[row] = gain
        else:
            actions.append(draw_step(pick, held, size, max_tokens))
    return BufferHistory(
        size, max_tokens, (*actions, draw_step(pick, held, size, max_tokens))
    )


def draw_step(
    pick: Random, held: Sequence[int], size: int, max_tokens: int
) -> BufferAction:
    """Return a step whose requests fit into their rows."""
    in_order = pick.random() < 0.5
    count = pick.randint(0, MAX_REQS)
    rows = pick.sample(range(MAX_REQS), count) if in_order else list(range(count))
    new, computed, room = [], [], max_tokens
    for row in rows:
        reach = held[row] * size
        length = pick.choice([reach, pick.randint(0, reach), min(reach, size + 1)])
        own = min(room, pick.choice([1, 1, 0, length, pick.randint(0, length)]), length)
        new.append(own)
        computed.append(length - own)
        room -= own
    padding = (pick.randint(0, MAX_REQS - count), pick.choice([0, room, min(room, 2)]))
    return BufferAction(
        tuple(rows),
        (),
        tuple(new),
        tuple(computed),
        in_order,
        pick.choice([None, padding]),
    )


@dataclass
class Engine:
    """The candidate's buffers, and their expected rows.

    Args:
        setting: Setting with the candidate.
        history: History that defines the sizes of the buffers.
        rows: Expected block ids of each row of the block table.
    """

    setting: Setting
    history: BufferHistory
    rows: list[list[int]] = field(default_factory=lambda: [[] for _ in range(MAX_REQS)])

    def __post_init__(self) -> None:
        self.buffers = self.setting.candidate.StepBuffers(
            MAX_REQS,
            self.history.max_tokens,
            MAX_BLOCKS,
            self.history.block_size,
            self.setting.device,
        )

    def do(self, action: BufferAction) -> CommonAttentionMetadata | None:
        """Apply an action to the buffers and to the expected rows. Return the step, if any."""
        if action.new is not None:
            return self.build(action)
        if action.blocks:
            given = [list(gained) for gained in action.blocks]
            self.buffers.append_blocks(list(action.rows), given)
            for row, blocks in zip(action.rows, action.blocks, strict=True):
                self.rows[row] += blocks
            for gained in given:
                gained.append(-7)  # the caller may modify its lists afterwards
            return None
        self.buffers.clear_rows(list(action.rows))
        for row in action.rows:
            self.rows[row] = []
        return None

    def build(self, action: BufferAction) -> CommonAttentionMetadata:
        """Return the step that the candidate builds."""
        assert action.new is not None
        sizes: list[int | None] = [None, None]
        if action.padding is not None:
            sizes = [
                len(action.new) + action.padding[0],
                sum(action.new) + action.padding[1],
            ]
        found: CommonAttentionMetadata = self.buffers.build(
            list(action.new),
            list(action.computed),
            list(action.rows) if action.in_order else None,
            *sizes,
        )
        return found

    def right(
        self, action: BufferAction, found: CommonAttentionMetadata
    ) -> dict[str, Any]:
        """Return the expected fields of a step. The block table is compared here, row by row."""
        assert action.new is not None
        size = self.history.block_size
        more_reqs, more_tokens = action.padding or (0, 0)
        reqs, tokens = len(action.new) + more_reqs, sum(action.new) + more_tokens
        rows = [self.rows[row] for row in action.rows]
        table = found.block_table_tensor
        expect_rows("the table", table.cpu(), [*rows, *[[]] * more_reqs])
        expect_same("its width", table.shape[1], MAX_BLOCKS)
        slots = [
            row[position // size] * size + position % size
            for row, new, old in zip(rows, action.new, action.computed, strict=True)
            for position in range(old, old + new)
        ]
        lens = [a + b for a, b in zip(action.new, action.computed, strict=True)]
        idle = [0] * more_reqs
        starts = counts([0, *accumulate([*action.new, *idle])])
        return {
            "query_start_loc": starts,
            "query_start_loc_cpu": starts,
            "seq_lens": counts([*lens, *idle]),
            "seq_lens_cpu": counts([*lens, *idle]),
            "num_computed_tokens_cpu": counts([*action.computed, *idle]),
            "num_reqs": reqs,
            "num_actual_tokens": sum(action.new),
            "max_query_len": max(action.new, default=0),
            "max_seq_len": max(lens, default=0),
            "block_table_tensor": table,
            "slot_mapping": torch.tensor(padded(slots, tokens), dtype=torch.int64),
        }


@law("StepBuffers", cases=several(histories()))
def a_step_in_the_buffers_does_not_depend_on_older_steps(
    setting: Setting, cases: list[BufferHistory]
) -> None:
    """Also after a larger step or a longer request in the same row, with or without padding."""
    for history in cases:
        engine = Engine(setting, history)
        for action in history.actions:
            found = engine.do(action)
            if found is not None:
                right = engine.right(action, found)
                expect_fields("the step", found, right, setting.device)
                live = sum(action.new or ())
                for copy in seen_by(found, history.block_size):
                    own = [slots[-1] for slots in copy]
                    expect_same("slots", own, found.slot_mapping.tolist()[:live])


ON_THE_DEVICE = ("query_start_loc", "seq_lens", "slot_mapping")


@law("StepBuffers", cases=several(histories()))
def the_tensors_of_a_step_keep_their_addresses(
    setting: Setting, cases: list[BufferHistory]
) -> None:
    """Views of the largest step hold the values of later steps. Host copies do not change."""
    for history in cases:
        engine = Engine(setting, history)
        most = (MAX_REQS, history.max_tokens)
        captured = {
            in_order: engine.build(
                BufferAction((), (), (), (), in_order=in_order, padding=most)
            )
            for in_order in (False, True)
        }
        earlier: list[tuple[CommonAttentionMetadata, dict[str, Any]]] = []
        for action in history.actions:
            found = engine.do(action)
            if found is None:
                continue
            seen_at_capture = captured[action.in_order]
            for name in (*ON_THE_DEVICE, "block_table_tensor"):
                tensor, original = getattr(found, name), getattr(seen_at_capture, name)
                if tensor.numel() and tensor.data_ptr() != original.data_ptr():
                    raise Disagreement(
                        name, "its address", "another", "that of the capture"
                    )
                expect_same(f"strides of {name}", tensor.stride(), original.stride())
                front = original[: tensor.shape[0]]
                expect_same(f"what a captured graph reads of {name}", front, tensor)
            for step, copy in earlier:
                expect_unchanged("an older step on the host", step, copy)
            on_host = {k: v for k, v in remember(found).items() if k.endswith("_cpu")}
            earlier.append((found, on_host))


@law("StepBuffers", cases=several(histories()))
def a_captured_size_holds_no_request_and_no_slot_after_the_batch(
    setting: Setting, cases: list[BufferHistory]
) -> None:
    """Each step is padded to the largest size, so values of an older step would be visible."""
    for history in cases:
        engine = Engine(setting, history)
        for action in history.actions:
            if action.new is not None:
                most = (
                    MAX_REQS - len(action.new),
                    history.max_tokens - sum(action.new),
                )
                action = BufferAction(
                    action.rows, (), action.new, action.computed, action.in_order, most
                )
            found = engine.do(action)
            if found is not None:
                right = engine.right(action, found)
                expect_fields("the step", found, right, setting.device)


@dataclass(frozen=True)
class BadBufferStep:
    """A call that the buffers reject.

    Args:
        method: Name of the method.
        arguments: Arguments of the call. The buffers have five rows of six blocks of four slots.
            Row 0 holds two blocks and row 1 holds one.
        what: The reason why the call is invalid.
    """

    method: str
    arguments: tuple[Any, ...]
    what: str


REJECTED = [
    BadBufferStep("append_blocks", ([5], [[1]]), "a row after the last"),
    BadBufferStep("append_blocks", ([-1], [[1]]), "a row before the first"),
    BadBufferStep(
        "append_blocks", ([0], [[1, 2, 3, 4, 5]]), "a row that outgrows the table"
    ),
    BadBufferStep(
        "append_blocks", ([2, 0], [[9], [1] * 5]), "a second row that outgrows it"
    ),
    BadBufferStep("append_blocks", ([2, 2], [[1], [2]]), "a row twice"),
    BadBufferStep("append_blocks", ([2, 3], [[1]]), "more rows than lists"),
    BadBufferStep("append_blocks", ([2], [[1], [2]]), "more lists than rows"),
    BadBufferStep("append_blocks", ([3, 2], [[9], [-1]]), "a negative id"),
    BadBufferStep("clear_rows", ([5],), "a row after the last"),
    BadBufferStep("clear_rows", ([0, -1],), "a row before the first"),
    BadBufferStep("build", ([1], [8]), "a sequence longer than its row"),
    BadBufferStep("build", ([1, 4], [7, 1]), "a second sequence longer than its row"),
    BadBufferStep("build", ([1], [0], [2]), "a row without blocks"),
    BadBufferStep("build", ([1], [0], [5]), "a row after the last"),
    BadBufferStep("build", ([1], [0], [-1]), "a row before the first"),
    BadBufferStep("build", ([1, 1], [0]), "more requests than contexts"),
    BadBufferStep("build", ([-1], [3]), "a negative count"),
    BadBufferStep("build", ([1], [-1]), "a negative context"),
    BadBufferStep("build", ([0] * 6, [0] * 6), "more requests than rows"),
    BadBufferStep("build", ([5, 4], [0, 0]), "more tokens than there is room for"),
    BadBufferStep("build", ([1, 1], [0, 0], None, 1), "padding to fewer requests"),
    BadBufferStep("build", ([2], [0], None, None, 1), "padding to fewer tokens"),
    BadBufferStep("build", ([1], [0], None, 6), "padding to more requests than rows"),
    BadBufferStep(
        "build", ([1], [0], None, None, 9), "padding to more tokens than room"
    ),
]


@law("StepBuffers", cases=REJECTED, claim="rejects shapes")
def a_rejected_step_leaves_the_buffers_unchanged(
    setting: Setting, invalid: BadBufferStep
) -> None:
    engine = Engine(setting, BufferHistory(4, 8, ()))
    engine.do(BufferAction((0, 1), ((7, 2), (5,))))
    step = BufferAction((0, 1), (), (1, 3), (6, 0), padding=(3, 4))
    before = engine.build(step)
    tensors = {name: getattr(before, name) for name in ON_THE_DEVICE}
    method = getattr(engine.buffers, invalid.method)
    expect_rejection(
        f"{invalid.method}: {invalid.what}",
        lambda: method(*invalid.arguments),
        {**tensors, "block_table_tensor": before.block_table_tensor[:2, :1]},
    )
    # a rejected call does not change the rows that it names
    engine.do(BufferAction((2, 3), ((11, 12), (13,))))
    after = BufferAction((3, 0, 2, 1), (), (2, 1, 2, 1), (2, 7, 6, 3), in_order=True)
    found = engine.build(after)
    expect_fields("the next step", found, engine.right(after, found), setting.device)


@dataclass(frozen=True)
class BufferSizes:
    """Invalid buffer sizes.

    Args:
        reqs, tokens, blocks, block_size: Arguments of StepBuffers, in this order.
    """

    reqs: int
    tokens: int
    blocks: int
    block_size: int


@law(
    "StepBuffers",
    cases=[
        BufferSizes(0, 8, 2, 4),
        BufferSizes(2, 0, 2, 4),
        BufferSizes(2, 8, -1, 4),
        BufferSizes(2, 8, 2, 0),
    ],
    claim="rejects shapes",
)
def buffers_without_space_are_rejected(setting: Setting, sizes: BufferSizes) -> None:
    make = setting.candidate.StepBuffers
    expect_rejection(
        repr(sizes),
        lambda: make(
            sizes.reqs, sizes.tokens, sizes.blocks, sizes.block_size, setting.device
        ),
    )
