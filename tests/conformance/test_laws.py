"""Every law of the conformance suite on both twins, with annotated shapes and dtypes checked.

conftest.py gives the first law of each area `mark.quick`.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis.strategies import SearchStrategy
from pagetwin.conformance import parametrize_with_laws
from pagetwin.conformance.api.check import (
    choose_device,
    choose_laws,
    load_candidate,
    make_case,
    make_setting,
    try_law,
)
from pagetwin.conformance.api.pytest_support import LawToTry
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.running.worker import Worker
from pagetwin.contract.operations import CONCEPTS

EXAMPLES = 3
MORE_EXAMPLES = 25
MORE = ("masks", "latents", "window")
"""Words of the laws that `make test-long` tries on more drawn cases."""
LISTED = 4 if not torch.cuda.is_available() else None
"""Listed cases of a law that the interpreter runs; `make mutants` and a GPU run all of them."""


@parametrize_with_laws("support.annotated_reference", examples=EXAMPLES)
def test_the_reference_obeys(law: LawToTry) -> None:
    assert not law().skipped


@parametrize_with_laws("support.annotated_optimized", examples=EXAMPLES, listed=LISTED)
def test_the_optimized_twin_obeys(law: LawToTry) -> None:
    assert not law().skipped


def with_more_draws(twin: str) -> list[LawToTry]:
    """Return the laws of MORE, with more drawn cases than in `make test`."""
    worker = Worker(f"support.annotated_{twin}", choose_device(None))
    chosen = {law.name: law for words in MORE for law in choose_laws(words)}
    return [
        LawToTry(law, worker, 1, MORE_EXAMPLES, None)
        for law in chosen.values()
        if isinstance(law.cases, SearchStrategy)
    ]


@pytest.mark.long
@pytest.mark.parametrize("twin", ["reference", "optimized"])
def test_masks_latents_and_windows_hold_with_more_draws(twin: str) -> None:
    laws = with_more_draws(twin)
    assert len(laws) > 8
    try:
        for law in laws:
            assert not law().skipped, law
    finally:
        laws[0].worker.stop()


@pytest.mark.parametrize("law", ALL_LAWS, ids=lambda law: law.name)
def test_a_case_can_be_made_again_from_what_a_report_shows(law: Law) -> None:
    shown: list[str] = []
    nothing = replace(law, needs=(), claim=None, body=lambda setting, case: None)
    setting = make_setting(load_candidate("reference"), "cpu")
    try_law(
        nothing,
        setting,
        seed_of_cases=5,
        examples=6,
        at=lambda case, held: shown.append(case),
    )
    assert shown
    for case in shown:
        assert repr(make_case(law, case)) == case


def test_every_operation_has_a_law() -> None:
    operations = {name for concept in CONCEPTS for name in concept.operations}
    assert operations | {"BACKENDS"} == {need for law in ALL_LAWS for need in law.needs}
