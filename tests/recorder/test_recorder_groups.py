"""The recorder on models whose layers have several groups of caches, some with a window."""

import random
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation
from pagetwin.recorder import Recorder, RecorderSettings
from pagetwin.recorder.laws.schedule import Ledger, ScheduledGroup
from pagetwin.recorder.laws.scheduled_rows import ScheduledRow
from pagetwin.recorder.step import step_tensors
from pagetwin.recorder.wrappers.vllm_schedule import (
    CacheGroup,
    WorkerSchedule,
    comparable_groups,
)

BLOCK = 4
WINDOW = 6
REFERENCE = load_implementation("reference")


def group(
    rows: dict[str, tuple[int, list[int]]], window: int | None = None
) -> ScheduledGroup:
    """Return rows of one new token each: computed tokens and blocks of each request."""
    given = [ScheduledRow(name, done, 1, ids) for name, (done, ids) in rows.items()]
    return ScheduledGroup(given, BLOCK, window)


def found(*steps: ScheduledGroup) -> str:
    """Return what a ledger with one group finds in the last of several steps."""
    ledger = Ledger()
    for step in steps[:-1]:
        assert ledger.schedule({0: step}) is None
    finding = ledger.schedule({0: steps[-1]})
    return "" if finding is None else finding.found


@pytest.mark.parametrize(
    ("computed", "is_given_up"), [(8, False), (9, True), (10, True)]
)
def test_a_block_before_the_window_may_be_given_to_another_request(
    computed: int, is_given_up: bool
) -> None:
    """The new token at position 9 attends to the keys from 4 on, so block 7 is not read."""
    before = group({"a": (7, [7, 8])}, WINDOW)
    after = group({"a": (computed, [7, 8, 9]), "b": (0, [7])}, WINDOW)
    assert (found(before, after) == "") == is_given_up


def test_a_block_inside_the_window_has_one_holder() -> None:
    before = group({"a": (9, [7, 8, 9])}, WINDOW)
    after = group({"a": (10, [7, 8, 9]), "b": (0, [8])}, WINDOW)
    assert found(before, after) == (
        "block 8 was given to request 'b', which writes to it in this step, while request"
        " 'a' holds it: expected a block that only the writer holds"
    )


def test_without_a_window_no_block_is_given_up() -> None:
    before, after = ({"a": (40, [*range(11)])}, {"b": (0, [0])})
    assert found(group(before), group(after)).startswith("block 0 was given to")


def test_requests_may_have_the_same_placeholder_before_their_windows() -> None:
    """vLLM's rows name block 0 where a prefix hit has blocks that the window does not need."""
    rows = {"a": (12, [0, 4, 5, 6]), "b": (12, [0, 4, 5, 7])}
    assert found(group(rows, WINDOW)) == ""


WRITER = ScheduledRow("a", 4, 6, [1, 2, 3])
"""Writes positions 4 to 9, so it fills block 2 and begins block 3."""


@pytest.mark.parametrize(
    ("reader", "is_right"),
    [
        (ScheduledRow("b", 8, 3, [1, 2, 4]), True),
        # it writes to the block itself, or reads slots that are not written in this step
        (ScheduledRow("b", 6, 3, [1, 2, 4]), False),
        (ScheduledRow("b", 12, 1, [1, 2, 3, 4]), False),
        # the block has other positions in it
        (ScheduledRow("b", 8, 3, [2, 1, 4]), False),
    ],
    ids=["prefix hit", "two writers", "block that is not full", "other positions"],
)
def test_a_request_may_join_with_a_prefix_that_is_computed_in_the_same_step(
    tmp_path: Path, reader: ScheduledRow, is_right: bool
) -> None:
    """vLLM's scheduler does so; both laws on shared blocks called it a corruption."""
    ledger = Ledger()
    rows = [WRITER, reader]
    finding = ledger.schedule({0: ScheduledGroup(rows, BLOCK)})
    assert (finding is None) == is_right
    recorder = Recorder(RecorderSettings(tmp_path))
    computed = [row.num_computed_tokens for row in rows]
    common = REFERENCE.build_common_attn_metadata(
        [row.num_scheduled_tokens for row in rows],
        computed,
        [list(row.block_ids) for row in rows],
        BLOCK,
    )
    recorder.begin_step(step_tensors(common, BLOCK))
    laws = [finding.law for finding in recorder.findings]
    expected = "one writer" if computed[1] == 6 else "shared blocks"
    assert recorder.is_on and laws == ([] if is_right else [expected])


def test_a_row_that_is_too_short_for_its_prefix_is_not_a_prefix_hit() -> None:
    ledger = Ledger()
    rows = [WRITER, ScheduledRow("b", 8, 3, [2])]
    finding = ledger.schedule({0: ScheduledGroup(rows, BLOCK)})
    assert finding is not None and finding.law == "block ownership"


def test_only_a_request_that_joins_may_hold_a_block_that_is_written() -> None:
    """A block of a running request is full already, so nothing else may be written to it."""
    ledger = Ledger()
    assert ledger.schedule({0: group({"b": (8, [1, 2, 4])})}) is None
    finding = ledger.schedule({0: ScheduledGroup([WRITER], BLOCK)})
    assert finding is not None and finding.request_id == "b"


def test_all_groups_take_their_blocks_from_one_pool() -> None:
    ledger = Ledger()
    groups = {"full": group({"a": (0, [3])}), "window": group({"a": (0, [3])}, WINDOW)}
    finding = ledger.schedule(groups)
    assert finding is not None and finding.request_id == "a"
    assert "request 'a' holds it for another group of layers" in finding.found


def test_a_request_that_leaves_releases_its_blocks_in_every_group() -> None:
    ledger = Ledger()
    first = {
        "full": group({"a": (9, [1, 2, 3])}),
        "window": group({"a": (9, [4, 5, 6])}, WINDOW),
    }
    assert ledger.schedule(first) is None
    ledger.free(["a", "a"])
    assert ledger._holders == dict.fromkeys(range(1, 7), 0) | {4: 0}
    second = {
        "full": group({"b": (0, [6])}),
        "window": group({"b": (0, [1])}, WINDOW),
    }
    assert ledger.schedule(second) is None


class Pool:
    """Gives blocks to requests in two groups as vLLM's scheduler does; some prefixes are shared.

    Args:
        draw: the source of choices.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._free = [*range(1, 40)]
        self._counts: Counter[int] = Counter()
        self.rows: dict[str, dict[str, list[int]]] = {}
        self.given_up: Counter[str] = Counter()
        self.computed: dict[str, int] = {}

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            self._counts[block] -= 1
            if not self._counts[block]:
                self._free.append(block)

    def take(self) -> int:
        block = self._free.pop(self._draw.randrange(len(self._free)))
        self._counts[block] += 1
        return block

    def free(self, name: str) -> None:
        rows = self.rows.pop(name)
        self.release(rows["full"])
        self.release(rows["window"][self.given_up.pop(name, 0) :])
        del self.computed[name]

    def add(self, name: str) -> None:
        """Add a request, which may share the full blocks of another one."""
        self.rows[name], self.computed[name] = {"full": [], "window": []}, 0
        others = [known for known, done in self.computed.items() if done >= 2 * BLOCK]
        if not others or self._draw.random() < 0.5:
            return
        donor = self._draw.choice(others)
        other = self.rows[donor]
        prefix = len(other["full"]) - 1
        self.computed[name] = prefix * BLOCK
        first = max(0, self.computed[name] - WINDOW + 1) // BLOCK
        if self.given_up[donor] > first:  # it no longer has the blocks of the window
            self.computed[name] = 0
            return
        self.rows[name]["full"] = other["full"][:prefix]
        self.rows[name]["window"] = [0] * first + other["window"][first:prefix]
        self.given_up[name] = first
        self._counts.update([*other["full"][:prefix], *other["window"][first:prefix]])

    def schedule(self, name: str) -> None:
        """Give up the blocks before the window, and take one if the next token needs it."""
        window = self.rows[name]["window"]
        first = max(0, self.computed[name] - WINDOW + 1) // BLOCK
        before = self.given_up[name]
        self.release(window[before:first])
        self.given_up[name] = max(first, before)
        for row in self.rows[name].values():
            if len(row) * BLOCK <= self.computed[name]:
                row.append(self.take())

    def groups(self, names: list[str]) -> dict[Hashable, ScheduledGroup]:
        given = {}
        for kind, window in (("full", None), ("window", WINDOW)):
            rows = {
                name: (self.computed[name], self.rows[name][kind]) for name in names
            }
            given[kind] = group(rows, window)
        return given


@pytest.mark.extended
@given(st.integers(0, 10**6))
def test_a_correct_scheduler_of_two_groups_violates_no_law(seed: int) -> None:
    """Requests join, share prefixes, grow, are preempted and leave."""
    draw = random.Random(seed)
    pool, ledger = Pool(draw), Ledger()
    for number in range(60):
        freed = []
        while len(pool.rows) > 3 or (pool.rows and draw.random() < 0.1):
            freed.append(draw.choice([*pool.rows]))
            pool.free(freed[-1])
        if draw.random() < 0.4:
            pool.add(f"r{number}")
        # a request that already runs gives up blocks before a new one takes them
        names = [name for name in pool.rows if draw.random() < 0.8]
        for name in names:
            pool.schedule(name)
        ledger.free(freed)
        assert ledger.schedule(pool.groups(names)) is None
        for name in names:
            pool.computed[name] += 1
    held = Counter(
        block
        for scheduled_group in ledger._groups.values()
        for name in scheduled_group.rows
        for block in scheduled_group.held(name)
    )
    assert held == Counter(ledger._holders)
    assert ledger._shared == {block for block, count in held.items() if count > 1}


def run_step(recorder: Recorder, scheduled: dict[str, Any], stale: str | None) -> None:
    """Run a step of two groups, with one new token per request.

    Args:
        recorder: the recorder.
        scheduled: by the group, computed tokens and blocks of each request. The engine has the
            requests in the other order.
        stale: Optional. The group in which a block of request "a" is another one. If None, none.
    """
    recorder.schedule_groups(
        {
            name: group(rows, WINDOW if name == "window" else None)
            for name, rows in scheduled.items()
        }
    )
    for name, rows in scheduled.items():
        names = [*reversed(rows)]
        table = [[*rows[name][1], 0] for name in names]
        if name == stale:
            table[names.index("a")][1] = 20
        computed = [rows[name][0] for name in names]
        common = REFERENCE.build_common_attn_metadata(
            [1] * len(computed), computed, table, BLOCK
        )
        tensors = step_tensors(common, BLOCK, WINDOW if name == "window" else None)
        recorder.begin_step(replace(tensors, scheduler_group=name), f"layers {name}")
    recorder.finish()


@pytest.mark.parametrize("stale", ["full", "window", None])
def test_a_stale_row_of_either_group_is_found(
    tmp_path: Path, stale: str | None
) -> None:
    recorder = Recorder(RecorderSettings(tmp_path))
    scheduled = {
        "full": {"a": (9, [1, 2, 3]), "b": (5, [4, 5])},
        "window": {"a": (9, [6, 7, 8]), "b": (5, [9, 10])},
    }
    run_step(recorder, scheduled, stale)
    laws = [(finding.law, finding.request_id) for finding in recorder.findings]
    assert laws == ([] if stale is None else [("block table", "a")])
    assert recorder.is_on


def test_groups_that_the_scheduler_is_not_known_of_are_checked_by_the_other_laws(
    tmp_path: Path,
) -> None:
    recorder = Recorder(RecorderSettings(tmp_path))
    recorder.schedule_groups({0: group({"a": (5, [1, 2])})})
    common = REFERENCE.build_common_attn_metadata([1], [5], [[3, 4]], BLOCK)
    tensors = replace(step_tensors(common, BLOCK), scheduler_group=-1)
    recorder.begin_step(tensors)
    assert recorder.is_on and recorder.findings == []
    common.slot_mapping[0] += 1
    recorder.begin_step(tensors)
    assert [finding.law for finding in recorder.findings] == ["slots"]


def spec(name: str, **fields: Any) -> Any:
    """Return an object whose class has the name of one of vLLM's specifications."""
    return type(name, (SimpleNamespace,), {})(**({"block_size": BLOCK} | fields))


def worker(*specs: Any, has_drafts: bool = False, is_async: bool = False) -> Any:
    """Return a worker's wrapper with vLLM's attributes; group 0 has the layer "0", and so on.

    Args:
        specs: the specification of each group.
        has_drafts: whether the engine has speculative decoding.
        is_async: whether a step is scheduled before the one before it has ended.
    """
    groups = [
        SimpleNamespace(kv_cache_spec=kv_cache_spec, layer_names=[str(index)])
        for index, kv_cache_spec in enumerate(specs)
    ]
    config = SimpleNamespace(kv_cache_groups=groups)
    return SimpleNamespace(
        worker=SimpleNamespace(
            model_runner=SimpleNamespace(kv_cache_config=config),
            vllm_config=SimpleNamespace(
                speculative_config=object() if has_drafts else None,
                scheduler_config=SimpleNamespace(async_scheduling=is_async),
            ),
        )
    )


FULL = spec("FullAttentionSpec", sliding_window=None)
SLIDING = spec("SlidingWindowSpec", sliding_window=WINDOW)


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([FULL], [(0, None)]),
        ([FULL, SLIDING], [(0, None), (1, WINDOW)]),
        # without the hybrid manager, layers with a window keep all of their blocks
        ([spec("FullAttentionSpec", sliding_window=WINDOW)], [(0, None)]),
        # layers of other sizes have one specification each
        (
            [spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": SLIDING})],
            [(0, WINDOW)],
        ),
        ([spec("CrossAttentionSpec"), FULL], [(1, None)]),
        ([spec("MambaSpec"), spec("ChunkedLocalAttentionSpec")], []),
    ],
)
def test_groups_of_paged_attention_are_compared(
    specs: list[Any], expected: Any
) -> None:
    groups = comparable_groups(worker(*specs))
    assert [(own_group.number, own_group.window) for own_group in groups] == expected
    assert all(own_group.block_size == BLOCK for own_group in groups)


@pytest.mark.parametrize(
    ("has_drafts", "is_async", "is_compared"),
    [(False, True, True), (True, False, True), (True, True, False)],
)
def test_verified_drafts_are_compared(
    has_drafts: bool, is_async: bool, is_compared: bool
) -> None:
    given = worker(FULL, has_drafts=has_drafts, is_async=is_async)
    assert len(comparable_groups(given)) == is_compared


def test_lengths_that_only_the_device_knows_are_not_compared() -> None:
    """The blocks that a step gives are told all the same: the worker may fill them with zeros."""
    given = worker(FULL, has_drafts=True, is_async=True)
    assert comparable_groups(given) == ()
    told: list[Any] = []
    recorder = SimpleNamespace(blocks_changed=told.append)
    new = SimpleNamespace(req_id="a", num_computed_tokens=0, block_ids=([7],))
    copy = SimpleNamespace(dst_block_id=9)
    output = SimpleNamespace(
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None, ([8],)]),
        finished_req_ids=set(),
        preempted_req_ids=None,
        kv_cache_block_copies=[copy],
    )
    WorkerSchedule(given).tell([recorder], output)  # type: ignore[list-item]
    assert told == [[7, 8, 9]]
    beside_another = WorkerSchedule(worker(FULL))
    beside_another.is_alone = False
    beside_another.tell([recorder], output)  # type: ignore[list-item]
    assert told[1:] == [[7, 8, 9]]


def test_each_group_gets_its_own_rows_of_the_scheduler() -> None:
    schedule = WorkerSchedule(worker(spec("MambaSpec"), FULL, SLIDING))
    assert schedule.groups[1] == CacheGroup(2, BLOCK, WINDOW, ("2",))
    assert [schedule.group_of([name]) for name in "012"] == [-1, 1, 2]
    told: list[Any] = []
    recorder = SimpleNamespace(
        blocks_changed=told.append,
        schedule_groups=lambda groups, freed: told.append((groups, freed)),
    )
    cached = SimpleNamespace(
        req_ids=["a"],
        num_computed_tokens=[3],
        new_block_ids=[([99], [5], [])],
        resumed_req_ids=set(),
    )
    empty = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[])
    new = SimpleNamespace(req_id="a", num_computed_tokens=0, block_ids=([98], [1], [2]))
    for news, olds, tokens in (([new], empty, 3), ([], cached, 2)):
        output = SimpleNamespace(
            scheduled_new_reqs=news,
            scheduled_cached_reqs=olds,
            num_scheduled_tokens={"a": tokens},
            finished_req_ids=set(),
            preempted_req_ids=None,
        )
        schedule.tell([recorder], output)  # type: ignore[list-item]
    assert told[0] == [98, 1, 2] and told[2] == [99, 5]
    rows = {
        1: ScheduledGroup([ScheduledRow("a", 3, 2, (1, 5))], BLOCK, None),
        2: ScheduledGroup([ScheduledRow("a", 3, 2, (2,))], BLOCK, WINDOW),
    }
    assert told[3] == (rows, [])


def attend(
    recorder: Recorder,
    cache: torch.Tensor,
    blocks: list[int],
    computed: int,
    window: int | None = None,
) -> None:
    """Run a step of one request with one new token. Key and value are the same cache."""
    common = REFERENCE.build_common_attn_metadata([1], [computed], [blocks], BLOCK)
    recorder.begin_step(step_tensors(common, BLOCK, window))
    query, output = torch.zeros(2, 1, 1, 8)
    arguments = (cache, cache, 1.0, AttentionOptions(sliding_window=window))
    recorder.attended("a", query, output, *arguments)


@pytest.mark.parametrize(("computed", "laws"), [(8, ["unchanged blocks"]), (9, [])])
def test_a_block_that_was_given_up_may_change(
    tmp_path: Path, computed: int, laws: list[str]
) -> None:
    """vLLM gives it to another group of layers, and the row still names it."""
    recorder = Recorder(RecorderSettings(tmp_path, sample_every=1))
    cache = torch.zeros(12, BLOCK, 1, 8)
    attend(recorder, cache, [7, 8], 5, WINDOW)
    cache[7, 0] = 1.0
    attend(recorder, cache, [7, 8, 9], computed, WINDOW)
    recorder.finish()
    found = [finding.law for finding in recorder.findings if finding.law != "attention"]
    assert recorder.is_on and found == laws


@pytest.mark.parametrize("is_told", [True, False])
def test_a_block_that_the_engine_fills_between_two_steps_may_change(
    tmp_path: Path, is_told: bool
) -> None:
    """The step before is checked when the next one begins, which forgot the blocks of both."""
    recorder = Recorder(RecorderSettings(tmp_path, sample_every=1))
    cache = torch.zeros(12, BLOCK, 1, 8)
    attend(recorder, cache, [7, 8], 4)
    if is_told:
        recorder.blocks_changed([7])
    cache[7] = 1.0
    attend(recorder, cache, [7, 8], 5)
    recorder.finish()
    found = [finding.law for finding in recorder.findings if finding.law != "attention"]
    assert recorder.is_on and found == ([] if is_told else ["unchanged blocks"])
