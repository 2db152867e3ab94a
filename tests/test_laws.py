"""Every law of the conformance suite on both twins, with annotated shapes and dtypes checked."""

import pytest
import torch
from pagetwin.conformance import parametrize_with_laws
from pagetwin.conformance.harness.law import Law
from pagetwin.conformance.harness.pytest_support import LawToTry
from pagetwin.conformance.harness.runner import (
    load_candidate,
    make_case,
    make_setting,
    try_law,
)
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.contract.operations import CONCEPTS

EXAMPLES = 3
LISTED = 4 if not torch.cuda.is_available() else None
"""Listed cases of a law that the interpreter runs; `make mutants` and a GPU run all of them."""


@parametrize_with_laws("annotated_reference", examples=EXAMPLES)
def test_the_reference_obeys(law: LawToTry) -> None:
    assert not law().skipped


@parametrize_with_laws("annotated_optimized", examples=EXAMPLES, listed=LISTED)
def test_the_optimized_twin_obeys(law: LawToTry) -> None:
    assert not law().skipped


@pytest.mark.parametrize("law", ALL_LAWS, ids=lambda law: law.name)
def test_a_case_can_be_made_again_from_what_a_report_shows(law: Law) -> None:
    shown: list[str] = []
    nothing = Law(law.name, law.area, (), law.cases, lambda setting, case: None)
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
