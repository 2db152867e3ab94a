"""Options of attention, two at a time: the design covers every pair, and every pair is right."""

import json
from random import Random

import pytest
import torch
from pagetwin.conformance import parametrize_with_laws
from pagetwin.conformance.api.pytest_support import LawToTry
from pagetwin.conformance.cases.choice_calls import build_call
from pagetwin.conformance.cases.option_pairs import (
    PLAIN,
    REJECTED,
    RejectedPair,
    all_pairs,
    design,
    draw_choice,
    pairs_of,
)
from record_options import RECORD, drawn
from support.twins import Twin


@pytest.mark.extended
@parametrize_with_laws("support.annotated_optimized", only="for every pair of options")
def test_every_pair_of_options_keeps_its_budget(law: LawToTry) -> None:
    """All listed cases of these laws, of which test_laws runs a few."""
    assert law().cases


@pytest.mark.quick
def test_the_design_has_every_pair_that_means_something() -> None:
    assert {pair for choice in design() for pair in pairs_of(choice)} == all_pairs()


@pytest.mark.quick
def test_a_random_choice_has_no_other_pair() -> None:
    pairs = all_pairs()
    for seed in range(50):
        assert pairs_of(draw_choice(Random(seed))) <= pairs


@pytest.mark.parametrize(
    "rejected", REJECTED, ids=lambda each: f"{each.one[0]} and {each.other[0]}"
)
def test_a_pair_that_means_nothing_raises(
    rejected: RejectedPair, twin: Twin, device: torch.device, checked_values: None
) -> None:
    for pair in rejected.pairs():
        call = build_call(PLAIN | dict(pair), 0, device)
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
            call.run_into(twin.raw, call.out_dtype, True)
        assert rejected.words in str(caught.value), pair


@pytest.mark.quick
def test_the_record_in_the_documentation_is_of_this_design() -> None:
    held = json.loads(RECORD.read_text(encoding="utf-8"))
    runs = held.pop("runs")
    assert held == drawn(), (
        "out of date: run python tests/conformance/record_options.py"
    )
    every = {"passed": list(range(len(design()))), "failed": []}
    assert {"reference on CPU", "optimized on CPU in Triton's interpreter"} <= set(runs)
    assert all(ran == every for ran in runs.values()), runs
