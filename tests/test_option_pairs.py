"""Does every option hold beside every other?

DESIGN covers every pair of values of all options; each of its choices runs on each twin and is held
against the brute force. What ran stands in option_runs.json, from which the documentation's tables
of options are made. To record a run anew, on a host or on a chip:

    PAGETWIN_RECORD_OPTIONS=1 python -m pytest -n 0 tests/test_option_pairs.py
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from conftest import Twin
from hypothesis import given, settings
from pagetwin.conformance.generators.options import (
    DESIGN,
    OPTIONS,
    PLAIN,
    REFUSED,
    Choice,
    RefusedPair,
    all_pairs,
    build_call,
    choices,
    draw_choice,
    pairs_of,
)

FEWER = settings(max_examples=min(8, settings().max_examples))
RECORD = Path(__file__).parent / "option_runs.json"
RECORDS = os.environ.get("PAGETWIN_RECORD_OPTIONS") == "1"


def drawn() -> dict[str, Any]:
    """Return what the tests draw, as the record holds it."""
    return {
        "options": {
            name: {
                "values": list(option.values),
                "meaning": option.meaning,
                "default": option.default,
            }
            for name, option in OPTIONS.items()
        },
        "refused": [
            {
                "one": [each.one[0], list(each.one[1])],
                "other": [each.other[0], list(each.other[1])],
                "reason": each.reason,
            }
            for each in REFUSED
        ],
        "choices": [list(choice.values()) for choice in DESIGN],
    }


def record(runs: dict[str, dict[int, bool]]) -> None:
    """Write what ran beside earlier runs of the same choices."""
    held = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    kept = held.get("runs", {}) if held.get("choices") == drawn()["choices"] else {}
    for name, ran in runs.items():
        kept[name] = {
            "passed": sorted(number for number, passed in ran.items() if passed),
            "failed": sorted(number for number, passed in ran.items() if not passed),
        }
    parts = []
    for name, value in (drawn() | {"runs": dict(sorted(kept.items()))}).items():
        entries = value.items() if isinstance(value, dict) else value
        lines = [
            f"{json.dumps(entry[0])}: {json.dumps(entry[1])}"
            if isinstance(value, dict)
            else json.dumps(entry)
            for entry in entries
        ]
        ends = "{}" if isinstance(value, dict) else "[]"
        inside = ",\n  ".join(lines)
        parts.append(f"{json.dumps(name)}: {ends[0]}\n  {inside}\n {ends[1]}")
    RECORD.write_text("{\n " + ",\n ".join(parts) + "\n}\n")


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, dict[int, bool]]]:
    """Return where each run's passes are noted, and record them if that is asked for."""
    ran: dict[str, dict[int, bool]] = {}
    yield ran
    if RECORDS:
        record(ran)


def place_of(twin: Twin, device: torch.device) -> str:
    """Return which twin runs where, as the record says it."""
    if device.type == "cuda":
        return f"{twin.name} on CUDA"
    interpreted = " in Triton's interpreter" if twin.name == "optimized" else ""
    return f"{twin.name} on CPU{interpreted}"


@pytest.mark.parametrize("number", range(len(DESIGN)))
def test_every_pair_of_options_keeps_its_budget(
    number: int,
    twin: Twin,
    reference: Twin,
    device: torch.device,
    runs: dict[str, dict[int, bool]],
) -> None:
    ran = runs.setdefault(place_of(twin, device), {})
    ran[number] = False
    call = build_call(DESIGN[number], number, device)
    call.assert_right(*call.run(twin), reference)
    ran[number] = True


@FEWER
@given(drawn=choices())
def test_any_combination_of_options_keeps_its_budget(
    drawn: tuple[Choice, int], twin: Twin, reference: Twin, device: torch.device
) -> None:
    call = build_call(*drawn, device)
    call.assert_right(*call.run(twin), reference)


def test_no_pair_of_options_is_left_out(report_lines: Callable[..., None]) -> None:
    counts = Counter(pair for choice in DESIGN for pair in pairs_of(choice))
    pairs = all_pairs()
    assert set(counts) == pairs
    report_lines(
        f"options: {len(pairs)} pairs of values of {len(OPTIONS)} options in"
        f" {len(DESIGN)} calls; how often the rarest pair of two options stands together:"
    )
    rarest: dict[tuple[str, str], int] = {}
    for (one, other), count in counts.items():
        key = one[0], other[0]
        rarest[key] = min(count, rarest.get(key, count))
    names = list(OPTIONS)
    for place, name in enumerate(names):
        row = "".join(f"{rarest[before, name]:3}" for before in names[:place])
        report_lines(f"{name:>22} {row}")


@pytest.mark.parametrize(
    "refused", REFUSED, ids=lambda each: f"{each.one[0]} and {each.other[0]}"
)
def test_a_pair_that_means_nothing_is_refused(
    refused: RefusedPair, twin: Twin, device: torch.device, checked_values: None
) -> None:
    for pair in refused.pairs():
        call = build_call(PLAIN | dict(pair), 0, device)
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
            call.run_into(twin.raw, call.out_dtype, True)
        assert refused.words in str(caught.value), pair


def test_a_pair_that_is_not_refused_runs(reference: Twin, device: torch.device) -> None:
    """What is left out of the draws is left out because it is refused, and nothing else is."""
    for number, choice in enumerate(DESIGN):
        out, _ = build_call(choice, 1000 + number, device).run(reference)
        assert not bool(out.float().isnan().any())


IGNORED = {
    name: [value for value in option.values[1:] if value != "cross"]
    for name, option in OPTIONS.items()
    if name
    in (
        "causal",
        "sliding_window",
        "attention_chunk_size",
        "tree_mask",
        "query_ranges",
        "logits_soft_cap",
        "alibi_slopes",
        "position_bias",
        "sinks",
        "scales",
        "scale",
    )
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in IGNORED for value in IGNORED[name]]
)
def test_the_judge_rejects_attention_without_the_option(
    name: str, value: str, reference: Twin
) -> None:
    choice = PLAIN | {
        name: value,
        "batch": "verification" if name == "tree_mask" else "mixed",
    }
    if name == "scales":
        choice["cache"] = "e4m3"
    names = ("k_scale", "v_scale") if name == "scales" else (name,)
    for ignored in names:
        caught = False
        for seed in range(4):  # one batch may happen to show nothing
            call = build_call(choice, seed, torch.device("cpu"))
            answer = call.answer()
            assert call.judge(answer.out.to(call.dtype), answer, reference).ok
            plain = True if ignored == "causal" else None
            wrong = call.answer(**{ignored: plain}).out.to(call.dtype)
            caught |= not call.judge(wrong, answer, reference).ok
        assert caught, ignored


@pytest.mark.skipif(RECORDS, reason="the record is being written")
def test_the_record_in_the_documentation_is_what_the_tests_draw() -> None:
    held = json.loads(RECORD.read_text())
    runs = held.pop("runs")
    assert held == json.loads(json.dumps(drawn())), (
        "tests/option_runs.json is out of date: run PAGETWIN_RECORD_OPTIONS=1 python -m"
        " pytest -n 0 tests/test_option_pairs.py"
    )
    every = {"passed": list(range(len(DESIGN))), "failed": []}
    assert {"reference on CPU", "optimized on CPU in Triton's interpreter"} <= set(runs)
    assert all(ran == every for ran in runs.values()), runs


def test_a_random_choice_holds_no_refused_pair() -> None:
    pairs = all_pairs()
    for seed in range(50):
        assert pairs_of(draw_choice(Random(seed))) <= pairs
