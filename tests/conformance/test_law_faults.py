"""Every law fails on an implementation with a fault.

How small a fault the laws find is the subject of `make mutants`. Here each law is shown to fail at
all, with a disagreement that names both answers.
"""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from law_faults import ANY, SINGLE, broken
from pagetwin.conformance.candidates.candidate import Candidate, Support, load_candidate
from pagetwin.conformance.checks.expect import Disagreement
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.running.trial import make_setting

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="runs once, on a machine without a GPU"
    ),
]

RIGHT = load_candidate("reference")
NAMED_BY_NO_LAW = ("compute_slot_mapping_batch", "merge_attn_states")
"""Operations with a fault where a law is about all operations."""

STATEFUL = ("block_manager", "scheduler")
"""Areas about classes with much state, which a fault of any method often stops with an error of its
own before a law compares anything. Such an error breaks a law too."""


def is_broken(law: Law, candidate: Candidate) -> bool:
    """Return whether a case shows a disagreement; other errors count in stateful areas only."""
    setting = make_setting(candidate, "cpu")
    options = settings(
        max_examples=10,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    try:
        if isinstance(law.cases, SearchStrategy):
            options(given(law.cases)(lambda case: law.body(setting, case)))()
        else:
            for case in law.cases:
                law.body(setting, case)
    except Disagreement:
        return True
    except Exception:
        return law.area in STATEFUL
    return False


@pytest.mark.parametrize("law", ALL_LAWS, ids=lambda law: law.name)
def test_a_law_fails_on_an_implementation_with_a_fault(law: Law) -> None:
    if law.name in SINGLE:
        name, fault = SINGLE[law.name]
        operations = RIGHT.operations | {name: fault(RIGHT.operations[name])}
        assert is_broken(law, Candidate("broken", operations, Support()))
        return
    names = law.needs or NAMED_BY_NO_LAW
    assert any(is_broken(law, broken(RIGHT, names, fault)) for fault in ANY.values())


def test_faults_of_single_operations_are_of_laws_that_exist() -> None:
    assert set(SINGLE) <= {law.name for law in ALL_LAWS}
