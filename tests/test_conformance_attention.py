"""Do the laws of attention hold for both twins, and does each break where a small fault is?

Faults stand in attention_faults.py, each beside the laws that must tell.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_faults import FAULTS, by_keyword, dropped
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from pagetwin.conformance.harness.candidate import (
    Candidate,
    OutsideSupport,
    Support,
    load_candidate,
)
from pagetwin.conformance.harness.law import Law, Setting
from pagetwin.conformance.harness.report import Status
from pagetwin.conformance.harness.trial import (
    find_law,
    make_case,
    make_setting,
    try_law,
)
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.contract.attention_options import pack_options
from pagetwin.contract.operations import CONCEPTS
from torch import Tensor

AREAS = (
    "attention",
    "masks",
    "invariance",
    "large_batches",
    "trees",
    "attention_refusals",
    "merging",
    "cascade",
    "latents",
    "latent_cache",
    "dcp_attention",
)
LAWS = [law for law in ALL_LAWS if law.area in AREAS]
RIGHT = load_candidate("reference")


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("name", ["reference", "optimized"])
def test_both_twins_hold_it(name: str, law: Law, device: torch.device) -> None:
    few = law.cases
    if not isinstance(few, SearchStrategy) and name == "optimized":
        few = few[:: max(1, len(few) // 4)]  # the interpreter is slow
    setting = make_setting(load_candidate(name), str(device))
    result = try_law(replace(law, cases=few), setting, seed_of_cases=3, examples=3)
    assert result.status == Status.HELD, result
    assert result.cases and not result.refused


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_every_case_can_be_made_again_from_what_a_report_shows(law: Law) -> None:
    shown: list[str] = []
    nothing = replace(law, needs=(), body=lambda setting, case: None)
    setting = make_setting(RIGHT, "cpu")
    try_law(nothing, setting, seed_of_cases=5, examples=6, at=shown.append)
    assert shown
    for case in shown:
        assert repr(make_case(law, case)) == case


def test_every_operation_of_attention_has_a_law() -> None:
    names = (
        "paged_attention",
        "encoder_attention",
        "merge_states",
        "cascade_attention",
        "latent_attention",
    )
    operations = {
        operation
        for concept in CONCEPTS
        if concept.name in names
        for operation in concept.operations
    }
    assert operations | {"dcp_attention"} == {
        need for law in LAWS for need in law.needs
    }


def broken_by(law: Law, setting: Setting) -> bool:
    """Tell whether a law is broken, without looking for a smaller case."""
    if not isinstance(law.cases, SearchStrategy):
        for case in law.cases:
            try:
                law.body(setting, case)
            except Exception:
                return True
        return False

    @settings(
        max_examples=60,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=law.cases)
    def drawn(case: Any) -> None:
        law.body(setting, case)

    try:
        drawn()
    except Exception:
        return True
    return False


@pytest.mark.parametrize("name", FAULTS)
def test_a_small_fault_breaks_the_laws_that_name_it(name: str) -> None:
    operation, fault, laws = FAULTS[name]
    operations = RIGHT.operations | {
        operation: fault(by_keyword(RIGHT.operations[operation]))
    }
    setting = make_setting(Candidate("broken", operations, Support()), "cpu")
    for law in laws:
        assert broken_by(find_law(law), setting), law


def narrow(query: Tensor, *given: Any, **named: Any) -> Tensor:
    """Attend as an adapter that takes decodes in float16 and one option."""
    for name in named:
        if name in ("lse", "out", "sinks", "k_scale", "v_scale", "tree_mask"):
            raise NotImplementedError(name)
    if query.dtype != torch.float16 or named["max_query_len"] > 4:
        raise NotImplementedError("not a decode in float16")
    out: Tensor = RIGHT.paged_attention(query, *given, **pack_options(**named))
    return out


def test_an_adapter_is_judged_on_what_it_declares() -> None:
    """Outside of that it may refuse; a wrong answer is one anywhere."""
    support = Support(
        dtypes=["float16"], max_query_len=1, options=["scale", "sliding_window"]
    )
    adapter = Candidate("narrow", {"paged_attention": narrow}, support)
    law = find_law("every new token sees its sequence up to itself")
    result = try_law(law, make_setting(adapter, "cpu"), 0, 60)
    assert result.status == Status.HELD
    assert 0 < result.refused < result.cases
    greedy = Candidate("greedy", {"paged_attention": narrow}, Support())
    assert try_law(law, make_setting(greedy, "cpu"), 0, 30).status == Status.BROKEN
    wrong = Candidate(
        "wrong", {"paged_attention": dropped("sliding_window")(narrow)}, support
    )
    law = find_law("a query sees no key outside of its window or chunk")
    assert broken_by(law, make_setting(wrong, "cpu"))
    assert issubclass(OutsideSupport, NotImplementedError)
