"""Laws of the steps of a draft model, whose lengths are known on the device alone."""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.kinds import PAD_SLOT_ID
from ..candidates.setting import Setting
from ..cases.steps import CROWD, LONG, MANY, Requests, counts, draw_requests, several
from ..checks.expect import expect_rejection, expect_same
from .law import law

UNTOUCHED = -99


@dataclass(frozen=True)
class Sampled:
    """Tokens that were sampled for requests with drafts.

    Args:
        drafts: [reqs] drafts of each request.
        rows: [reqs] sampled tokens of each, in rows of the same length.
        discarded: [reqs] whether its tokens do not count.
        vocab_size: tokens from this number on are not valid.
    """

    drafts: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    discarded: tuple[bool, ...]
    vocab_size: int = 100

    def valid(self, req: int) -> list[int]:
        """Return the tokens of a request that count, one by one."""
        row = [] if self.discarded[req] else self.rows[req]
        return [token for token in row if token != -1 and token < self.vocab_size]


@st.composite
def sampled(draw: st.DrawFn) -> Sampled:
    """Return accepted and rejected drafts, tokens outside of the vocabulary, and no tokens."""
    pick = Random(draw(st.integers(0, 2**20)))
    reqs, width = pick.choice([0, 1, 2, 5]), pick.choice([1, 2, 4, 9])
    rows = [
        tuple(pick.choice([-1, 0, 7, 99, 100, 5]) for _ in range(width))
        for _ in range(reqs)
    ]
    return Sampled(
        tuple(pick.choice([0, 0, 1, width]) for _ in range(reqs)),
        tuple(rows),
        tuple(pick.random() < 0.3 for _ in range(reqs)),
    )


@law(
    "eagle_prepare_next_token_padded",
    cases=several(sampled()),
    edges=[[Sampled((0,) * 70_000, ((3, -1),) * 70_000, (False, True) * 35_000)]],
)
def a_request_goes_on_from_its_last_valid_token(
    setting: Setting, cases: list[Sampled]
) -> None:
    for case in cases:
        reqs = len(case.rows)
        width = len(case.rows[0]) if reqs else 3
        backup = counts([-5 - req for req in range(reqs)]).to(setting.device)
        ids = torch.tensor(case.rows, dtype=torch.int32).view(reqs, width)
        tokens, number = setting.candidate.eagle_prepare_next_token_padded(
            ids.to(setting.device),
            torch.tensor(case.discarded, dtype=torch.bool).to(setting.device),
            backup,
            case.vocab_size,
        )
        right = [(case.valid(req) or [-5 - req])[-1] for req in range(reqs)]
        lens = [len(case.valid(req)) for req in range(reqs)]
        expect_same("tokens", tokens, counts(right).to(setting.device))
        expect_same("numbers", number, counts(lens).to(setting.device))


@law("eagle_prepare_inputs_padded", cases=several(sampled()))
def the_row_before_the_rejected_drafts_is_sampled(
    setting: Setting, cases: list[Sampled]
) -> None:
    """A request without drafts is a chunk of a prompt, or a decode: its last row counts."""
    for case in cases:
        new = [drafts + 1 + req % 3 for req, drafts in enumerate(case.drafts)]
        valid = [
            min(len(case.valid(req)), case.drafts[req] + 1) for req in range(len(new))
        ]
        totals = torch.tensor(case.drafts, dtype=torch.int64).cumsum(0).tolist()
        starts = [0, *torch.tensor(new, dtype=torch.int64).cumsum(0).tolist()]
        given = [counts(numbers) for numbers in (totals, valid, starts)]
        rows, rejected = setting.candidate.eagle_prepare_inputs_padded(
            *(tensor.to(setting.device) for tensor in given)
        )
        # each rejected draft is taken from the end
        right, lost = [], []
        for req, drafts in enumerate(case.drafts):
            own = list(range(starts[req], starts[req + 1]))
            gone = drafts + 1 - valid[req] if drafts else 0
            right.append(own[len(own) - 1 - gone] if gone < len(own) else own[0] - 1)
            lost.append(gone)
        expect_same("rows", rows, counts(right).to(setting.device))
        expect_same("rejected drafts", rejected, counts(lost).to(setting.device))


@dataclass(frozen=True)
class Moved:
    """Requests that move on by one position.

    Args:
        positions: [reqs] position of each request's token.
        block_size: Slots per block.
        max_model_len: Positions that the model has.
        padding: Rows after the requests.
        spare: Rows after those, which do not change.
        seed: Seed of the block ids.
    """

    positions: tuple[int, ...]
    block_size: int
    max_model_len: int
    padding: int = 0
    spare: int = 0
    seed: int = 0


@st.composite
def moved(draw: st.DrawFn) -> Moved:
    """Return requests at both sides of the ends of blocks, and of the model's range."""
    pick = Random(draw(st.integers(0, 2**20)))
    size, longest = pick.choice([1, 4, 16]), pick.choice([1, 2, 16, 40])
    positions = [
        max(0, pick.choice([0, 1, size - 1, size, longest - 2, longest - 1, longest]))
        for _ in range(pick.choice([0, 1, 2, 7]))
    ]
    sizes = (size, longest, pick.choice([0, 0, 3]), pick.choice([0, 2]))
    return Moved(tuple(positions), *sizes, pick.randint(0, 99))


@law(
    "eagle_step_update_slot_mapping_and_metadata",
    cases=several(moved()),
    edges=[
        [Moved((70_000, 65_534, 131_070, 99_998), 16, 99_999 + 32_000, 300)],
        [Moved(tuple(req % 30 for req in range(66_000)), 4, 29)],
    ],
)
def each_request_moves_on_by_one_position(setting: Setting, cases: list[Moved]) -> None:
    """At the end of the model's range it starts again, with one key, and stores nothing."""
    for case in cases:
        reqs, rows = len(case.positions), len(case.positions) + case.padding
        pick = Random(case.seed)
        width = max([*case.positions, 0]) // case.block_size + 2
        tables = [
            [pick.randrange(2**20) for _ in range(width)] for _ in range(min(reqs, 9))
        ]
        table = torch.tensor(
            [tables[req % 9] for req in range(reqs)], dtype=torch.int32
        ).view(reqs, width)
        lens = [position % 50 + 1 for position in case.positions]
        tensors = [
            torch.tensor(case.positions, dtype=torch.int64),
            table,
            counts(lens),
            torch.full((reqs + case.spare,), UNTOUCHED, dtype=torch.int64),
            torch.full((rows + case.spare,), UNTOUCHED, dtype=torch.int64),
        ]
        positions, table, seq_lens, out, slots = (
            tensor.to(setting.device) for tensor in tensors
        )
        setting.candidate.eagle_step_update_slot_mapping_and_metadata(
            positions, table, seq_lens, case.block_size, case.max_model_len, out, slots,
            rows,
        )  # fmt: skip
        right: dict[str, list[int]] = {"positions": [], "slots": [], "lengths": []}
        for req, position in enumerate(case.positions):
            new, row = position + 1, tables[req % 9]
            is_past = new >= case.max_model_len
            slot = row[new // case.block_size] * case.block_size + new % case.block_size
            right["positions"].append(0 if is_past else new)
            right["slots"].append(PAD_SLOT_ID if is_past else slot)
            longer = min(lens[req] + 1, case.max_model_len)
            right["lengths"].append(1 if is_past else longer)
        spare = [UNTOUCHED] * case.spare
        padding = [PAD_SLOT_ID] * case.padding
        expect_wide("positions", out, [*right["positions"], *spare])
        expect_wide("slots", slots, [*right["slots"], *padding, *spare])
        expect_same("lengths", seq_lens, counts(right["lengths"]).to(setting.device))
        expect_wide("the positions before", positions, list(case.positions))


def expect_wide(what: str, found: Tensor, right: list[int]) -> None:
    """Raise unless an int64 tensor has these numbers."""
    expect_same(
        what, found, torch.tensor(right, dtype=torch.int64, device=found.device)
    )


@st.composite
def steps(draw: st.DrawFn) -> Requests:
    """Return the requests of a step, some without new tokens."""
    return draw_requests(Random(draw(st.integers(0, 2**20))))


@law(
    "compute_token_to_req_indices",
    cases=several(steps()),
    edges=[[step] for step in (MANY, LONG, CROWD)],
)
def each_token_belongs_to_the_request_whose_rows_hold_it(
    setting: Setting, cases: list[Requests]
) -> None:
    """Rows that the host does not count get request 0."""
    for step in cases:
        if not step.new:
            continue
        owners = step.owners()
        for mapped in {0, len(owners) // 2, len(owners)}:
            found = setting.candidate.compute_token_to_req_indices(
                counts(step.starts).to(setting.device), mapped, len(owners) + 2
            )
            right = [*owners[:mapped], *[0] * (len(owners) + 2 - mapped)]
            expect_same("requests", found, counts(right).to(setting.device))


@dataclass(frozen=True)
class BadDraftStep:
    """An invalid call.

    Args:
        operation: Name of the operation.
        arguments: Its arguments; lists become int32 tensors.
        what: The reason why it is invalid.
    """

    operation: str
    arguments: tuple[Any, ...]
    what: str


TOKENS, INPUTS, MOVE, OWNERS = (
    "eagle_prepare_next_token_padded",
    "eagle_prepare_inputs_padded",
    "eagle_step_update_slot_mapping_and_metadata",
    "compute_token_to_req_indices",
)
REJECTED = [
    BadDraftStep(INPUTS, ([1, 2], [1], [0, 2, 4]), "a request too many"),
    BadDraftStep(INPUTS, ([1, 2], [1, 1], [0, 2]), "a start too few"),
    BadDraftStep(OWNERS, ([0], 0, 0), "a step without requests"),
    BadDraftStep(OWNERS, ([0, 2], -1, 2), "a negative number of tokens"),
    BadDraftStep(OWNERS, ([0, 2], 2, -1), "a negative number of rows"),
]


@law(TOKENS, INPUTS, OWNERS, cases=REJECTED, claim="rejects shapes")
def impossible_steps_of_drafts_are_rejected(
    setting: Setting, invalid: BadDraftStep
) -> None:
    operation = getattr(setting.candidate, invalid.operation)
    given = [
        counts(number).to(setting.device) if isinstance(number, list) else number
        for number in invalid.arguments
    ]
    expect_rejection(invalid.what, lambda: operation(*given), {})


MOVES = {
    "a length too many": {"seq_lens": 3},
    "a row of blocks too few": {"block_table_tensor": 1},
    "rows without blocks": {"max_blocks": 0},
    "too few positions": {"out_clamped_positions": 1},
    "too few slots": {"out_slot_mapping": 2},
    "fewer rows than requests": {"input_batch_size": 1},
    "a block without slots": {"block_size": 0},
    "a model without positions": {"max_model_len": 0},
}


@law(MOVE, cases=sorted(MOVES), claim="rejects shapes")
def moves_of_other_requests_are_rejected(setting: Setting, what: str) -> None:
    sizes = {
        "positions_1d": 2,
        "block_table_tensor": 2,
        "max_blocks": 4,
        "seq_lens": 2,
        "out_clamped_positions": 2,
        "out_slot_mapping": 3,
        "block_size": 4,
        "max_model_len": 9,
        "input_batch_size": 3,
    } | MOVES[what]
    max_blocks = sizes.pop("max_blocks")
    given: dict[str, Any] = {}
    for name, size in sizes.items():
        wide = name in ("positions_1d", "out_clamped_positions", "out_slot_mapping")
        dtype = torch.int64 if wide else torch.int32
        shape = (size, max_blocks) if name == "block_table_tensor" else (size,)
        is_number = name in ("block_size", "max_model_len", "input_batch_size")
        tensor = torch.ones(shape, dtype=dtype, device=setting.device)
        given[name] = size if is_number else tensor
    operation = getattr(setting.candidate, MOVE)
    written = ("seq_lens", "out_clamped_positions", "out_slot_mapping")
    expect_rejection(
        what, lambda: operation(**given), {name: given[name] for name in written}
    )


@law(MOVE, cases=[-1, 15, 20], claim="rejects contents")
def a_position_past_the_row_of_blocks_is_rejected(
    setting: Setting, position: int
) -> None:
    lens = counts([3]).to(setting.device)
    out = torch.zeros(1, dtype=torch.int64, device=setting.device)
    expect_rejection(
        f"position {position} and 4 blocks of 4",
        lambda: getattr(setting.candidate, MOVE)(
            torch.tensor([position], device=setting.device),
            torch.ones(1, 4, dtype=torch.int32, device=setting.device),
            lens, 4, 99, out, out.clone(),
        ),
        {"the lengths": lens, "the positions": out},
    )  # fmt: skip
