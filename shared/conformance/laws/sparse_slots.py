"""Laws of the slots for sparse attention: states of groups, windows with images, and rings.

The expected slots are found by search: all positions of a sequence are tried, one by one, and a
cache is a dictionary.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from ..candidates.setting import Setting
from ..cases.batches import put_on
from ..checks.canaries import kept
from ..checks.expect import expect_rejection, expect_same
from .law import law

COMPRESS = "get_compressed_slot_mapping"
WINDOW = "compute_swa_indices_and_lens"
RING = "compute_kpool_tail_slot_mapping"


@dataclass(frozen=True)
class SlotsPlan:
    """A step whose requests have blocks anywhere.

    Args:
        query_lens, seq_lens: New tokens and tokens of each request.
        block_size: Slots or states per block.
        padding: Rows past the last request.
        unit: Tokens per state, or slots of a ring.
        ranks, interleave: Of decode context parallelism.
        window: Visible keys.
        images: Optional. First and last position of the image in each sequence.
        most: Of `max_image_tokens`.
        replay: Whether the first keys of some sequences are not stored.
        causal: As in the operation.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_size: int = 4
    padding: int = 0
    unit: int = 1
    ranks: int = 1
    interleave: int = 1
    window: int = 3
    images: tuple[tuple[int, int], ...] | None = None
    most: int = 0
    replay: bool = False
    causal: bool = True
    seed: int = 0

    def tokens(self) -> list[tuple[int, int]]:
        """Return the request and the position of each row; request -1 for padding."""
        found = [
            (req, seq_len - query_len + new)
            for req, (query_len, seq_len) in enumerate(
                zip(self.query_lens, self.seq_lens, strict=True)
            )
            for new in range(query_len)
        ]
        return found + [(-1, 0)] * self.padding

    def step(self, device: torch.device) -> dict[str, Tensor]:
        """Return start locations, lengths and a block table, all of them views with strides."""
        pick, reqs = Random(self.seed), len(self.seq_lens)
        starts = [sum(self.query_lens[:req]) for req in range(reqs + 1)]
        columns = max([1, *(-(-n // self.block_size) for n in self.seq_lens)])
        # the columns of a wider table: what follows a row is another row
        wide = torch.full((reqs, columns + 1), -9, dtype=torch.int32)
        ids = pick.sample(range(1, 1000 + reqs * columns), reqs * columns)
        wide[:, :-1] = torch.tensor(ids, dtype=torch.int32).view(reqs, columns)
        pairs = {"query_start_loc": starts, "seq_lens": list(self.seq_lens)}
        found = {
            name: torch.tensor(numbers, dtype=torch.int32).repeat_interleave(2)[::2]
            for name, numbers in pairs.items()
        }
        return {
            name: put_on(tensor, device)
            for name, tensor in (found | {"block_table": wide[:, :-1]}).items()
        }


def slot_of(table: list[list[int]], req: int, number: int, size: int) -> int:
    """Return the slot of an entry of a sequence."""
    return table[req][number // size] * size + number % size


COMPRESSED = [
    SlotsPlan((5, 1, 9), (5, 8, 30), unit=4, padding=2),
    SlotsPlan((3, 0, 2), (3, 0, 7), block_size=1, unit=1, seed=1),
    SlotsPlan((2, 130), (256, 257), block_size=2, unit=128, seed=2),
    SlotsPlan((13, 4), (20, 33), unit=2, ranks=2, interleave=2, seed=3),
    SlotsPlan((25, 3), (40, 33), block_size=2, unit=2, ranks=3, interleave=4, seed=4),
    # more new tokens than the sequence has: a row of a captured step without a request
    SlotsPlan((2, 4), (0, 3), unit=2, seed=5),
    SlotsPlan((), (), padding=3, unit=2, seed=6),
    SlotsPlan((0,), (9,), unit=3, seed=7),
    SlotsPlan(
        (*(1,) * 298, 300, 2), (*range(298), 300, 66_000), block_size=300, unit=3, seed=8
    ),
]  # fmt: skip


@law(COMPRESS, cases=COMPRESSED)
def the_last_token_of_a_group_has_the_slot_of_its_state(
    setting: Setting, plan: SlotsPlan
) -> None:
    """On the rank that stores the group. A group's tokens without a slot of their own count."""
    pick, given = Random(plan.seed), plan.step(setting.device)
    table = given["block_table"].tolist()
    for rank in range(plan.ranks):
        right, own = [], []
        for req, position in plan.tokens():
            is_here = position // plan.interleave % plan.ranks == rank
            is_stored = is_here and req >= 0 and pick.random() < 0.9
            own.append(pick.randrange(2000) if is_stored else -1)
            # the groups of this rank, one after the other
            before = [
                first
                for first in range(0, position + 1, plan.unit)
                if first // plan.interleave % plan.ranks == rank
            ]
            ends_group = position >= 0 and (position + 1) % plan.unit == 0
            slot = -1
            if is_stored and ends_group:
                slot = slot_of(table, req, len(before) - 1, plan.block_size)
            right.append(slot)
        slots = torch.tensor(own, dtype=torch.int64).to(setting.device)
        with kept(slot_mapping=slots, **given):
            found = getattr(setting.candidate, COMPRESS)(
                slot_mapping=slots, **given, block_size=plan.block_size,
                compress_ratio=plan.unit, dcp_world_size=plan.ranks,
                dcp_kv_cache_interleave_size=plan.interleave,
            )  # fmt: skip
        expected = torch.tensor(right, dtype=torch.int64)
        expect_same("slots", found.cpu(), expected)


WINDOWS = [
    SlotsPlan((1, 5, 2), (9, 5, 20), padding=2),
    SlotsPlan((4, 3), (6, 40), block_size=1, window=1, seed=1),
    SlotsPlan((8, 6, 1), (10, 9, 30), images=((2, 6), (5, 12), (29, 29)), most=8, seed=2),
    SlotsPlan((9, 8), (9, 30), window=2, images=((1, 7), (20, 29)), most=3, seed=3),
    SlotsPlan((3, 5, 2), (9, 12, 7), window=6, replay=True, seed=4),
    SlotsPlan((3, 2, 4), (9, 5, 4), window=4, causal=False, padding=1, seed=5),
    SlotsPlan((3, 2), (19, 8), causal=False, images=((2, 18), (0, 7)), most=9, seed=6),
    SlotsPlan((9, 2), (20, 8), causal=False, images=((2, 18), (0, 7)), most=5, seed=11),
    SlotsPlan((2, 4), (0, 3), seed=7),
    SlotsPlan((), (), padding=3, seed=8),
    SlotsPlan((0,), (9,), seed=9),
    SlotsPlan((*(1,) * 298, 2), (*range(298), 66_000), block_size=300, window=40, seed=10),
]  # fmt: skip


@law(WINDOW, cases=WINDOWS)
def a_token_has_the_slots_of_its_window_and_its_image(
    setting: Setting, plan: SlotsPlan
) -> None:
    """In the order of positions; no key past the sequence, and none before the stored ones."""
    pick, given = Random(plan.seed), plan.step(setting.device)
    table = given["block_table"].tolist()
    replay = [(8, 5, 0)[req % 3] * plan.replay for req in range(len(plan.seq_lens))]
    valid, ranges, rows = [], [], []
    for req, position in plan.tokens():
        valid.append(pick.random() < 0.9)
        image = plan.images[req] if plan.images and req >= 0 else (-1, -1)
        # a range that does not contain the token means nothing
        is_inside = image[0] <= position <= image[1]
        is_given = is_inside or pick.random() < 0.5
        ranges.append(image if is_given else (-1, -1))
        keys = []
        for key in range(plan.seq_lens[req] if req >= 0 else 0):
            context = plan.seq_lens[req] - plan.query_lens[req]
            distance = (position if plan.causal else context - 1) - key
            is_seen = distance < plan.window and (distance >= 0 or not plan.causal)
            if is_inside and image[0] <= key <= image[1]:
                is_seen |= -plan.most <= position - key < plan.most
            if is_seen and key >= replay[req]:
                keys.append(slot_of(table, req, key, plan.block_size))
        rows.append(keys if valid[-1] and req >= 0 else [])
    most = max(plan.window, plan.most) + plan.most
    if not plan.causal:
        most = max(most, max(plan.window, plan.most) + max(plan.query_lens))
    options: dict[str, Any] = {"causal": plan.causal}
    if plan.images is not None:
        spans = torch.tensor(ranges, dtype=torch.int32).view(-1, 2)
        options["query_ranges"] = spans.to(setting.device)
        options["max_image_tokens"] = plan.most
    if plan.replay:
        options["replay_start"] = torch.tensor(replay, dtype=torch.int32).to(
            setting.device
        )
    is_valid = torch.tensor(valid, dtype=torch.bool).to(setting.device)
    for width in (most, most + 3):
        with kept(is_valid_token=is_valid, **given):
            slots, lens = getattr(setting.candidate, WINDOW)(
                **given, is_valid_token=is_valid, block_size=plan.block_size,
                window_size=plan.window, index_width=width, **options,
            )  # fmt: skip
        right = [row + [-1] * (width - len(row)) for row in rows]
        expected = torch.tensor(right, dtype=torch.int32).view(-1, width)
        expect_same("slots", slots.cpu(), expected)
        counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        expect_same("lens", lens.cpu(), counts)


RINGS = [
    SlotsPlan((2, 3, 1), (6, 13, 1), unit=4, padding=2),
    SlotsPlan((7, 4, 0), (9, 4, 2), unit=3, seed=1),
    SlotsPlan((2, 1), (5, 1), unit=1, seed=2),
    SlotsPlan((2, 4), (0, 3), unit=4, seed=3),
    SlotsPlan((), (), padding=2, unit=4, seed=4),
    SlotsPlan(
        (*(1,) * 298, 300), (*range(1, 299), 66_000), block_size=99_999, unit=260, seed=5
    ),
]  # fmt: skip


@law(RING, cases=RINGS)
def a_ring_keeps_the_last_tokens_of_its_request(
    setting: Setting, plan: SlotsPlan
) -> None:
    """Each slot is written once in a step: the token that a write in order would leave there."""
    given = plan.step(setting.device)
    if plan.seq_lens:
        given["block_table"][0, 0] = 0  # the null block
    table = given["block_table"].tolist()
    holds: dict[int, int] = {}
    for token, (req, position) in enumerate(plan.tokens()):
        if req >= 0 and position >= 0 and table[req][0]:
            holds[table[req][0] * plan.unit + position % plan.unit] = token
    right = torch.full((len(plan.tokens()),), -1, dtype=torch.int64)
    for slot, token in holds.items():
        right[token] = slot
    with kept(**given):
        found = getattr(setting.candidate, RING)(
            **given, kpool=plan.unit, num_tokens=len(right)
        )
    expect_same("slots", found.cpu(), right)


def small_step(device: torch.device, what: dict[str, Any]) -> dict[str, Tensor]:
    """Return a step of two tokens, of a sequence with four tokens in blocks of two."""
    ids = [5, what.get("table", 3)]
    numbers = {
        "query_start_loc": [what.get("start", 0), 2],
        "seq_lens": [what.get("seq_len", 4)],
        "block_table": [ids],
    }
    return {
        name: torch.tensor(values, dtype=torch.int32).to(device)
        for name, values in numbers.items()
    }


def arguments_for_slots(device: torch.device) -> dict[str, dict[str, Any]]:
    """Return the arguments of a small call of each operation, by its name."""
    given: dict[str, dict[str, Any]] = {
        COMPRESS: {
            "slot_mapping": torch.tensor([7, 8]), "block_size": 2, "compress_ratio": 1
        },
        WINDOW: {
            "is_valid_token": torch.tensor([True, True]), "block_size": 2, "window_size": 3,
            "index_width": 4, "max_image_tokens": 1,
            "query_ranges": torch.zeros(2, 2, dtype=torch.int32),
        },
        RING: {"kpool": 2, "num_tokens": 2},
    }  # fmt: skip
    return {
        name: small_step(device, {})
        | {
            key: value.to(device) if isinstance(value, Tensor) else value
            for key, value in numbers.items()
        }
        for name, numbers in given.items()
    }


BAD_STATES: dict[str, dict[str, Any]] = {
    "a block id below 0": {"table": -1},
    "a block id whose slots have more than 32 bits": {"table": (2**31 - 1) // 2},
    "a state past the block table": {"seq_len": 10},
    "a length below 0": {"seq_len": -1},
    "starts that decrease": {"start": -1},
}


@law(COMPRESS, cases=sorted(BAD_STATES), claim="rejects contents")
def a_state_without_a_block_is_rejected(setting: Setting, what: str) -> None:
    slots = torch.tensor([7, 8]).to(setting.device)
    operation = getattr(setting.candidate, COMPRESS)
    right = operation(
        slots, **small_step(setting.device, {}), block_size=2, compress_ratio=1
    )
    expect_same("slots", right.tolist(), [6, 7])
    step = small_step(setting.device, BAD_STATES[what])
    expect_rejection(
        what, lambda: operation(slots, **step, block_size=2, compress_ratio=1)
    )


@law(
    WINDOW, cases=[*sorted(BAD_STATES), "too many new tokens"], claim="rejects contents"
)
def a_window_without_a_block_is_rejected(setting: Setting, what: str) -> None:
    valid = torch.tensor([True, True]).to(setting.device)
    operation = getattr(setting.candidate, WINDOW)
    sizes = {"block_size": 2, "window_size": 2, "index_width": 3, "causal": True}
    right, _ = operation(
        **small_step(setting.device, {}), is_valid_token=valid, **sizes
    )
    expect_same("slots", right.tolist(), [[11, 6, -1], [6, 7, -1]])
    if what == "too many new tokens":
        sizes["causal"] = False
    step = small_step(setting.device, BAD_STATES.get(what, {}))
    expect_rejection(what, lambda: operation(**step, is_valid_token=valid, **sizes))


@law(RING, cases=["block id", "one ring for two"], claim="rejects contents")
def a_request_without_a_ring_of_its_own_is_rejected(
    setting: Setting, what: str
) -> None:
    """The null block holds no ring, so several requests may name it."""
    plan = SlotsPlan((1, 1, 1), (3, 4, 5))
    given = plan.step(setting.device)
    given["block_table"][:, 0] = torch.tensor([0, 4, 0], dtype=torch.int32)
    operation = getattr(setting.candidate, RING)
    found = operation(**given, kpool=4, num_tokens=3)
    expect_same("slots", found.tolist(), [-1, 19, -1])
    given["block_table"][2, 0] = -1 if what == "block id" else 4
    expect_rejection(what, lambda: operation(**given, kpool=4, num_tokens=3))


BAD_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "no tokens per state": (COMPRESS, {"compress_ratio": 0}),
    "a group on two ranks": (COMPRESS, {"compress_ratio": 2, "dcp_world_size": 2}),
    "slots in 32 bits": (COMPRESS, {"slot_mapping": torch.int32}),
    "lengths in 64 bits": (COMPRESS, {"seq_lens": torch.int64}),
    "a window of 0": (WINDOW, {"window_size": 0}),
    "a row too short for the window": (WINDOW, {"index_width": 2}),
    "a row too short for the image": (WINDOW, {"max_image_tokens": 2}),
    "ranges without a size": (WINDOW, {"max_image_tokens": 0}),
    "a size without ranges": (WINDOW, {"query_ranges": None}),
    "flags in 8 bits": (WINDOW, {"is_valid_token": torch.uint8}),
    "a ring of 0": (RING, {"kpool": 0}),
    "tokens below 0": (RING, {"num_tokens": -1}),
    "a table without columns": (
        RING,
        {"block_table": torch.zeros(1, 0, dtype=torch.int32)},
    ),
}


@law(COMPRESS, WINDOW, RING, cases=sorted(BAD_SHAPES), claim="rejects shapes")
def impossible_calls_for_slots_are_rejected(setting: Setting, what: str) -> None:
    name, changes = BAD_SHAPES[what]
    given = arguments_for_slots(setting.device)[name]
    # a dtype is that of the argument, other values are the argument
    given |= {
        key: given[key].to(value) if isinstance(value, torch.dtype) else value
        for key, value in changes.items()
    }
    given = {
        key: value.to(setting.device) if isinstance(value, Tensor) else value
        for key, value in given.items()
    }
    expect_rejection(what, lambda: getattr(setting.candidate, name)(**given))
