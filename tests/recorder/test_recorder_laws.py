"""Laws of the recorder on steps of a few tokens: each law finds its violation and no other."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation
from pagetwin.recorder.findings import Corruption, CorruptionFound
from pagetwin.recorder.laws.attention import (
    RecordedCall,
    check_attention,
    gather_rows,
    why_not_recomputed,
)
from pagetwin.recorder.laws.bookkeeping import LAWS, check_groups, check_step
from pagetwin.recorder.laws.cache import (
    RecordedWrite,
    WatchedBlock,
    check_watched,
    check_write,
)
from pagetwin.recorder.laws.row_case import RowCase
from pagetwin.recorder.laws.row_table import RowTable
from pagetwin.recorder.laws.schedule import Ledger, ScheduledGroup
from pagetwin.recorder.laws.scheduled_rows import ScheduledRow, ScheduledRows
from pagetwin.recorder.step import HostStep
from torch import Tensor

TREES = torch.ones(2, 3, 3, dtype=torch.bool)
RANGES = torch.zeros(4, 2, dtype=torch.int32)
REFERENCE: Any = load_implementation("reference")


def step(**given: Any) -> HostStep:
    """Return a step of a prefill of 3 tokens and a decode, in blocks of 4 slots."""
    fields: dict[str, Any] = {
        "number": 5,
        "group": "layers",
        "query_start_loc": [0, 3, 4],
        "seq_lens": [6, 5],
        "block_table": [[2, 3, 9], [7, 8, 9]],
        "slot_mapping": [11, 12, 13, 32],
        "max_query_len": 3,
        "max_seq_len": 8,
        "block_size": 4,
        "num_blocks": 10,
    }
    fields |= given
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        fields[name] = np.array(fields[name], dtype=np.int32)
    return HostStep(**fields)


STEP = step()


def test_a_right_step_violates_no_law() -> None:
    assert check_step(STEP) is None
    padded = step(
        query_start_loc=[0, 3, 4, 4],
        seq_lens=[6, 5, 99],
        block_table=[[2, 3, 9], [7, 8, 9], [-1, -1, -1]],
        slot_mapping=[11, 12, 13, 32, -1, -1],
    )
    assert check_step(padded) is None
    # entries past the sequence may hold anything, also before the number of blocks is known
    assert check_step(step(block_table=[[2, 3, -5], [7, 8, 999]])) is None
    assert check_step(step(num_blocks=None)) is None


WRONG: dict[str, tuple[str, str, dict[str, Any]]] = {
    "too few starts": ("starts", "2 entries from 0", {"query_start_loc": [0, 3]}),
    "too many starts": ("starts", "4 entries", {"query_start_loc": [0, 1, 3, 4]}),
    "starts from 1": ("starts", "from 1", {"query_start_loc": [1, 3, 4]}),
    "starts that decrease": ("starts", "query_start_loc[2] = 2", {"query_start_loc": [0, 3, 2]}),
    "a sequence shorter than its new tokens": (
        "lengths", "at least its 3 new tokens", {"seq_lens": [2, 5]},
    ),
    "a sequence longer than the bound": (
        "lengths", "seq_lens = 6: expected at most max_seq_len = 5", {"max_seq_len": 5},
    ),
    "a sequence longer than its row": (
        "lengths", "at most 4, what its row holds", {"block_table": [[2], [7]]},
    ),
    "more new tokens than the bound": (
        "lengths", "3 new tokens: expected at most max_query_len = 2", {"max_query_len": 2},
    ),
    "a negative block": ("block ids", "is -1", {"block_table": [[2, -1, 9], [7, 8, 9]]}),
    "a block past the cache": (
        "block ids", "is 8: expected a block of the cache, from 0 to 7", {"num_blocks": 8},
    ),
    "too few slots": ("slots", "slot_mapping has 3 entries", {"slot_mapping": [11, 12, 13]}),
    "a slot of another block": (
        "slots", "in block 1, which is not", {"slot_mapping": [11, 12, 13, 4]},
    ),
    "another slot of the block": (
        "slots", "another slot of the same request", {"slot_mapping": [11, 12, 13, 33]},
    ),
    "a token that is not stored": (
        "slots", "it would not be stored", {"slot_mapping": [11, 12, 13, -1]},
    ),
    "padding with a slot": (
        "padding", "padded row 4 has slot 0:", {"slot_mapping": [11, 12, 13, 32, 0]},
    ),
    "padding in a block": (
        "padding", "in a block of a request", {"slot_mapping": [11, 12, 13, 32, -1, 30]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_law_of_a_step_finds_its_violation(name: str) -> None:
    law, words, changes = WRONG[name]
    found = check_step(step(**changes))
    assert found is not None and found.law == law and words in found.found


def test_the_owner_of_the_slot_of_padding_is_named() -> None:
    found = check_step(step(slot_mapping=[11, 12, 13, 32, -1, 30]))
    assert found is not None and found.row == 1
    found = check_step(step(slot_mapping=[11, 12, 13, 32, 0]))
    assert found is not None and found.row is None


def test_two_writers_of_a_slot_are_found_and_padding_is_not_a_writer() -> None:
    twice = step(block_table=[[2, 3, 9], [7, 3, 9]], slot_mapping=[11, 12, 13, 12])
    found = check_step(twice)
    assert found is not None and found.law == "one writer"
    assert "tokens 1 and 3" in found.found
    zero = step(
        seq_lens=[3, 1],
        block_table=[[0, 3, 9], [0, 8, 9]],
        slot_mapping=[0, 1, 2, 0],
    )
    found = check_step(zero)
    assert found is not None and found.law == "one writer"


def test_layers_that_store_nothing_and_steps_without_slots_are_not_checked() -> None:
    shared = step(slot_mapping=[0, 0, 0, 0], stores_all=False)
    assert [law(shared) for law in LAWS if law.__name__ == "check_slots"] == [None]
    assert check_step(step(slot_mapping=[-1] * 4, seq_lens=[99, 99])) is None


def test_a_block_that_is_written_is_in_no_other_row_except_as_a_prefix_hit() -> None:
    # the second request joins with the block that the first one fills
    fills = {
        "query_start_loc": [0, 3, 4],
        "seq_lens": [4, 5],
        "slot_mapping": [9, 10, 11, 32],
    }
    hit = step(**fills, block_table=[[2, 3, 9], [2, 8, 9]])
    assert check_step(hit) is None
    for changes in (
        # at another place of the row
        {"seq_lens": [4, 9], "block_table": [[2, 3, 9], [7, 2, 8]], "max_seq_len": 9},
        # of which not all slots are filled
        {"seq_lens": [3, 5], "slot_mapping": [8, 9, 10, 32]},
        # of which the request computes a part itself
        {"seq_lens": [4, 2], "slot_mapping": [9, 10, 11, 9]},
    ):
        wrong = step(**{**fills, "block_table": [[2, 3, 9], [2, 8, 9]]} | changes)
        found = check_step(wrong)
        assert found is not None and found.law in ("shared blocks", "one writer")


def test_groups_of_layers_have_the_same_requests() -> None:
    other = step(group="others")
    assert check_groups([STEP, other]) is None
    for changes in (
        {"seq_lens": [6, 4]},
        {"query_start_loc": [0, 2, 4]},
        {"seq_lens": [6, 5, 0]},
        {"seq_lens": [6]},
    ):
        found = check_groups([STEP, step(group="others", **changes)])
        assert found is not None and found.law == "groups"
        assert "between the layers layers" in found.found


# writes and watched blocks


def caches(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return a key cache and a value cache of ten blocks."""
    numbers = torch.arange(10 * 4 * 2 * 3).view(10, 4, 2, 3) / 64
    return numbers.to(dtype), (numbers + 1).to(dtype)


def write(
    fp8_steps: int = 0, dtype: torch.dtype = torch.float32, **scales: Any
) -> RecordedWrite:
    """Return the right write of the step's tokens."""
    key_cache, value_cache = caches(dtype)
    slots = STEP.slot_mapping.tolist()
    key, value = (
        cache.float().flatten(0, 1)[slots] for cache in (key_cache, value_cache)
    )
    return RecordedWrite("layer", key, value, key_cache, value_cache, scales, fp8_steps)


def checked(recorded: RecordedWrite) -> Corruption | None:
    run = REFERENCE.reshape_and_cache
    return check_write(recorded, STEP, [0, 1, 2, 3], run)


@pytest.mark.parametrize("side", ["key", "value"])
def test_a_key_or_value_that_is_not_in_its_slot_is_found(side: str) -> None:
    assert checked(write()) is None
    recorded = write()
    getattr(recorded, f"{side}_cache")[3, 1, 1, 2] += 1
    found = checked(recorded)
    assert found is not None and f"the {side} at position 5 (slot 13)" in found.found
    assert found.row == 0 and found.evidence["tokens"] == [0, 1, 2, 3]


def test_the_first_elements_of_a_wide_value_are_compared() -> None:
    """A layer whose values are smaller than its keys has slots of two elements here."""
    recorded = write()
    recorded = replace(recorded, value_cache=recorded.value_cache[..., :2])
    assert checked(recorded) is None
    recorded.value_cache[3, 1, 1, 1] += 1
    assert checked(recorded) is not None


def test_fp8_numbers_may_differ_by_the_codes_of_the_engine() -> None:
    dtype = torch.float8_e4m3fn
    scales = {"k_scale": 1.0, "v_scale": 1.0}
    for steps, moved in ((0, 0), (1, 1), (1, -1)):
        recorded = write(steps, dtype, **scales)
        recorded.key_cache.view(torch.uint8)[3, 1, 1, 2] += moved
        assert checked(recorded) is None
    for steps, moved in ((0, 1), (1, 2), (1, -2)):
        recorded = write(steps, dtype, **scales)
        recorded.key_cache.view(torch.uint8)[3, 1, 1, 2] += moved
        assert checked(recorded) is not None


def test_codes_next_to_zero_are_neighbours_whatever_their_sign() -> None:
    recorded = write(1, torch.float8_e4m3fn, k_scale=1.0, v_scale=1.0)
    recorded.key[2, 1, 2] = -0.0
    recorded.key_cache.view(torch.uint8)[3, 1, 1, 2] = 1
    assert checked(recorded) is None
    recorded.key_cache.view(torch.uint8)[3, 1, 1, 2] = 0x82
    assert checked(recorded) is not None


def test_nan_that_was_written_as_given_is_right() -> None:
    recorded = write()
    recorded.key[3, 0, 0] = recorded.key_cache[8, 0, 0, 0] = torch.nan
    assert checked(recorded) is None


def watched(block: int = 7, column: int = 0, at: int = 4) -> WatchedBlock:
    return WatchedBlock.of("layer", replace(STEP, number=at), block, column, *caches())


@pytest.mark.parametrize("side", [0, 1])
def test_a_full_block_that_changes_is_found(side: int) -> None:
    own, writes = watched(), np.zeros(10, np.int64)
    assert check_watched(own, STEP, writes) is None
    own.caches[side][7, 3, 1, 0] += 1
    found = check_watched(own, STEP, writes)
    assert found is not None and found.law == "unchanged blocks" and found.row == 1
    name = ("key", "value")[side]
    assert f"the {name} at position 3 (block 7, offset 3)" in found.found


def test_a_block_that_may_change_is_not_compared() -> None:
    writes = np.zeros(10, np.int64)

    def changed(
        block: int, column: int, now: HostStep, last: int = 0
    ) -> Corruption | None:
        own = watched(block, column)
        own.caches[0][block] += 1
        writes[:] = last
        return check_watched(own, now, writes)

    assert changed(7, 0, STEP) is not None
    assert changed(7, 0, STEP, last=4) is not None
    assert changed(7, 0, STEP, last=5) is None  # a step has written to it
    assert changed(5, 0, STEP) is None  # no request holds it
    assert changed(7, 1, STEP) is None  # it is at another place of a row
    assert changed(7, 7, STEP) is None  # the table has no such column
    assert changed(2, 0, STEP) is None  # it is not full
    assert changed(7, 0, step(window=2)) is not None
    assert changed(7, 0, step(window=1)) is None  # it is before the window
    idle = step(query_start_loc=[0, 3, 3], slot_mapping=[11, 12, 13])
    assert changed(7, 0, idle) is None  # the row is idle


# attention


def recorded_call(
    options: AttentionOptions | None = None, **given: Any
) -> RecordedCall:
    """Return the right attention of all tokens of the step."""
    key_cache, value_cache = (torch.sin(cache * 9) for cache in caches())
    query = torch.cos(torch.arange(4 * 2 * 3.0)).view(4, 2, 3)
    options = options or AttentionOptions()
    output = REFERENCE.paged_attention(
        query,
        key_cache,
        value_cache,
        torch.from_numpy(STEP.block_table),
        torch.from_numpy(STEP.query_start_loc),
        torch.from_numpy(STEP.seq_lens),
        3,
        8,
        options=options,
    )
    fields = {"query": query, "output": output, "key_cache": key_cache} | given
    return RecordedCall(
        layer="layer", value_cache=value_cache, scale=None, options=options,
        implementation="other", **fields,
    )  # fmt: skip


def attended(
    call: RecordedCall, tokens: tuple[int, ...] = (0, 1, 2, 3)
) -> Corruption | None:
    own = call.take(torch.tensor(tokens))
    return check_attention(own, STEP, tokens, REFERENCE.paged_attention)


def test_a_wrong_row_is_found_with_its_worst_element() -> None:
    for options in (AttentionOptions(), AttentionOptions(causal=False)):
        assert attended(recorded_call(options)) is None
    call = recorded_call()
    call.output[2, 1, 2] += 1e-3
    call.output[2, 0, 1] += 2e-3
    found = attended(call)
    assert found is not None and (found.law, found.row) == ("attention", 0)
    assert "attention of position 5 has error" in found.found
    assert "head 0, element 1 is" in found.found
    slight = recorded_call()
    slight.output[3] += 3e-5
    assert attended(slight) is not None


def test_the_evidence_is_the_row_that_is_wrong() -> None:
    call = recorded_call()
    call.output[3, 1, 2] += 1
    found = attended(call, (1, 3))
    assert found is not None
    own = RowCase.of_dict(found.evidence["rows"], "cpu")
    assert own.seq_lens.tolist() == [5] and torch.equal(own.query[0], call.query[3])
    assert torch.equal(own.key_blocks[1], call.key_cache[8])
    verdict, _ = own.judge(REFERENCE.paged_attention)
    assert not verdict.ok and verdict.row == 0


def test_nan_is_named_by_where_it_comes_from() -> None:
    call = recorded_call()
    call.output[2, 1, 2] = torch.nan
    found = attended(call)
    assert found is not None and "is not finite;" in found.found
    call = recorded_call()
    call.query[2, 0, 0] = torch.nan
    found = attended(call)
    assert found is not None and "its query, which holds NaN" in found.found
    call = recorded_call()
    call.key_cache[3, 0, 0, 0] = torch.nan
    found = attended(call, (3, 2))
    assert found is not None and "the key of position 4, which holds NaN" in found.found


def test_nan_past_the_sequence_is_not_the_cause() -> None:
    call = recorded_call()
    call.value_cache[8, 2] = torch.nan
    call.query[3, 0, 0] = torch.inf
    found = attended(call)
    assert found is not None and "its query" in found.found


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, ""),
        ({"query": torch.zeros(4, 2, 3).to(torch.float8_e4m3fn)}, "an FP8 query"),
        ({"output": torch.zeros(4, 2, 3).to(torch.float8_e4m3fn)}, "an FP8 output"),
        ({"options": AttentionOptions(tree_mask=TREES)}, "tree_mask"),
        ({"options": AttentionOptions(query_ranges=RANGES)}, "query_ranges"),
        ({"options": AttentionOptions(out_scale=0.5)}, "out_scale"),
        (
            {"options": AttentionOptions(causal=False, alibi_slopes=torch.ones(2))},
            "positions without causality",
        ),
        ({"options": AttentionOptions(causal=False)}, ""),
        ({"options": AttentionOptions(alibi_slopes=torch.ones(2))}, ""),
    ],
)  # fmt: skip
def test_why_a_row_is_not_recomputed(given: dict[str, Any], why: str) -> None:
    assert why_not_recomputed(replace(recorded_call(), **given)) == why


def test_an_fp8_query_is_recomputed_with_its_scale() -> None:
    scaled = recorded_call()
    eighths = torch.randint(
        -8, 9, scaled.query.shape, generator=torch.Generator().manual_seed(0)
    )
    query = (eighths / 8).to(torch.float8_e4m3fn)
    call = replace(scaled, query=query, query_scale=torch.tensor(2.0))
    case = gather_rows(call.take(torch.tensor([3])), STEP, [3])
    assert torch.equal(case.query, query[3:].float() * 2)
    assert case.weight_error == torch.finfo(query.dtype).eps / 2
    again = RowCase.of_dict(case.as_dict(), "cpu")
    assert again.weight_error == case.weight_error


def test_queries_in_two_parts_are_joined() -> None:
    call = recorded_call()
    own = replace(call, query=call.query[..., :2], query_rope=call.query[..., 2:])
    assert torch.equal(own.take(torch.tensor([1, 3])).query, call.query[[1, 3]])


# rows and holders of blocks


def rows(*given: ScheduledRow) -> ScheduledRows:
    """Return scheduled rows, in a table of their own."""
    table = RowTable()
    for row in given:
        table.append(row.request_id, 0, row.block_ids)
    lines = table.lines_of([row.request_id for row in given])
    return ScheduledRows(given, lines, table, 4, are_own=True)


A, B = ScheduledRow("a", 3, 3, (2, 3)), ScheduledRow("b", 4, 1, (7, 8, 6))


def test_rows_are_matched_in_any_order() -> None:
    assert rows(A, B).match(STEP) == ({0: "a", 1: "b"}, None)
    assert rows(B, A).match(STEP) == ({0: "a", 1: "b"}, None)
    both = rows(A, B)
    turned = step(
        query_start_loc=[0, 1, 4], seq_lens=[5, 6], block_table=[[7, 8, 1], [2, 3, 1]]
    )
    for batch, names in ((STEP, {0: "a", 1: "b"}), (turned, {0: "b", 1: "a"})) * 2:
        assert both.match(batch) == (names, None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            (A._replace(block_ids=(2, 5)), B),
            "entry 1 of its block-table row is block 3: expected 5",
        ),
        ((A._replace(block_ids=(2,)), B), "expected no further block"),
        (
            (A._replace(num_computed_tokens=2), B),
            "3 new tokens and 6 tokens is in the batch",
        ),
        (
            (A._replace(num_computed_tokens=4, num_scheduled_tokens=2), B),
            "in the batch",
        ),
        ((A,), "1 new tokens and 5 tokens is in the batch"),
    ],
)
def test_a_row_that_no_request_has_is_found(given: Any, words: str) -> None:
    _, found = rows(*given).match(STEP)
    assert found is not None and found.law == "block table" and words in found.found


def test_a_request_is_in_one_row_alone() -> None:
    twice = step(
        query_start_loc=[0, 3, 6], seq_lens=[6, 6], block_table=[[2, 3, 9], [2, 3, 9]]
    )
    names, found = rows(A, B).match(twice)
    assert names == {0: "a"} and found is not None and found.row == 1


def test_the_request_of_a_stranger_is_one_with_its_lengths_that_has_no_row() -> None:
    other = ScheduledRow("c", 3, 3, (5, 6))
    found = rows(A, other)
    changed = step(
        query_start_loc=[0, 3, 6], seq_lens=[6, 6], block_table=[[2, 3, 9], [5, 1, 9]]
    )
    names, stranger = found.match(changed)
    assert names == {0: "a"} and stranger is not None and stranger.request_id == "c"


def test_own_rows_have_blocks_of_the_cache_and_no_other_holder() -> None:
    own = rows(A, B)
    assert own.are_own(9) and own.are_own(None)
    assert not own.are_own(8)
    negative = rows(A._replace(block_ids=(2, -3)))
    assert not negative.are_own(None)
    shared = ScheduledRows((A,), np.zeros(1, np.int64), RowTable(), 4, are_own=False)
    assert not shared.are_own(None)


def test_the_line_of_a_freed_request_keeps_its_blocks_until_it_is_reused() -> None:
    table = RowTable()
    table.append("a", 0, (2, 3))
    (line,) = table.lines_of(["a"])
    table.remove("a")
    for number in range(20):
        table.append(number, 0, (50 + number,))
        assert table.lines_of([number])[0] != line
    assert table._blocks[line, :2].tolist() == [2, 3]
    table.reuse()
    count = len(table._blocks)
    for number in range(20, 60):
        table.append(number, 0, (50,))
        if table.lines_of([number])[0] == line:
            assert table._blocks[line].tolist()[1:3] == [-1] * len(
                table._blocks[line, 1:3]
            )
            break
    else:
        pytest.fail("the line is not used again")
    assert len(table._blocks) == count


def scheduled(
    *given: ScheduledRow, window: int | None = None
) -> dict[Any, ScheduledGroup]:
    return {0: ScheduledGroup(given, 4, window)}


def test_a_written_block_has_no_other_holder() -> None:
    ledger = Ledger()
    assert ledger.schedule(scheduled(A, B)) is None
    found = ledger.schedule(scheduled(ScheduledRow("c", 0, 2, (8,))))
    assert found is not None and found.law == "block ownership"
    assert "block 8 was given to request 'c'" in found.found and found.request_id == "b"


def test_a_freed_or_given_up_block_has_no_holder() -> None:
    ledger = Ledger()
    ledger.schedule(scheduled(A, B))
    ledger.free(["b"])
    assert ledger.schedule(scheduled(ScheduledRow("c", 0, 2, (8,)))) is None
    ledger = Ledger()
    ledger.schedule(scheduled(ScheduledRow("w", 8, 1, (1, 2, 3)), window=4))
    assert ledger.schedule(scheduled(ScheduledRow("c", 0, 2, (1,)))) is None
    found = ledger.schedule(scheduled(ScheduledRow("d", 0, 2, (2,))))
    assert found is not None


def test_a_filled_block_is_a_prefix_hit_of_a_request_that_joins() -> None:
    fills = ScheduledRow("a", 3, 1, (2,))
    for joined, is_right in (
        (ScheduledRow("c", 4, 1, (2, 5)), True),
        (ScheduledRow("c", 8, 1, (5, 2, 6)), False),  # at another place
        (ScheduledRow("c", 2, 3, (2, 5)), False),  # it computes a part itself
    ):
        ledger = Ledger()
        assert (ledger.schedule(scheduled(fills, joined)) is None) is is_right
    ledger = Ledger()
    half = ScheduledRow("a", 2, 1, (2,))
    assert ledger.schedule(scheduled(half, ScheduledRow("c", 4, 1, (2, 5)))) is not None


def test_a_request_joins_only_once() -> None:
    ledger = Ledger()
    hit = ScheduledRow("c", 4, 1, (2, 5))
    assert ledger.schedule(scheduled(ScheduledRow("a", 3, 1, (2,)), hit)) is None
    later = ledger.schedule(scheduled(ScheduledRow("x", 3, 1, (2,))))
    assert later is not None


def test_findings_name_the_request_or_its_row() -> None:
    assert Corruption("law", "found").request == ""
    assert Corruption("law", "found", 0).request == "the request in row 0"
    assert Corruption("law", "found", 1, 0).request == "request 0"
    error = CorruptionFound("sentence", Corruption("law", "found"), None)
    assert error.finding.law == "law" and error.path is None
