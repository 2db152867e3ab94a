"""Signatures that drawn cases share: few sizes and options, and everything else as always."""

from random import Random
from typing import Any

import pytest
from pagetwin.conformance import Status
from pagetwin.conformance.api.check import check_implementation
from pagetwin.conformance.candidates.candidate import Candidate, Support, load_candidate
from pagetwin.conformance.cases.batches import BatchPlan
from pagetwin.conformance.cases.option_pairs import OPTIONS, allowed, drawn_choice
from pagetwin.conformance.cases.reuse import Reuse, compiled
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.running.trial import find_law, make_setting, try_law
from pagetwin.conformance.running.worker import SIGNATURES, signatures_on

ATTENDS = "every new token attends to its sequence up to itself"
OPTION = "paged attention is right under any options"
CHUNKS = "a prompt in chunks equals the prompt in one step"
WINDOWS = "a query attends to no key outside of its window or chunk"
SIZES = (
    "block_size", "kv_heads", "group", "head_size", "dtype", "layout", "value_layout", "fused",
)  # fmt: skip
SETTING = make_setting(load_candidate("reference"), "cpu")


def cases_of(sentence: str, signatures: int | None, seed: int = 0) -> list[Any]:
    """Return the cases that a law draws."""
    cases: list[Any] = []
    law = find_law(sentence)
    told = Law(law.name, law.area, (), law.cases, lambda _, case: cases.append(case))
    try_law(told, SETTING, seed, 60, signatures=signatures)
    return cases


def sizes_of(plan: BatchPlan) -> tuple[Any, ...]:
    return tuple(getattr(plan, name) for name in SIZES)


@pytest.mark.extended
@pytest.mark.parametrize("count", [1, 4])
def test_plans_have_few_sizes_and_as_many_lengths_as_always(count: int) -> None:
    drawn, free = cases_of(ATTENDS, count), cases_of(ATTENDS, None)
    assert len({sizes_of(plan) for plan in drawn}) == count
    assert len({sizes_of(plan) for plan in free}) > 40
    for name in ("query_lens", "kv_lens", "needle", "table", "padding", "seed"):
        some = {getattr(plan, name) for plan in drawn}
        every = {getattr(plan, name) for plan in free}
        assert len(some) >= 0.7 * len(every), name


def test_another_seed_has_other_sizes() -> None:
    sizes = [{sizes_of(plan) for plan in cases_of(ATTENDS, 4, seed)} for seed in (0, 1)]
    assert not sizes[0] & sizes[1]


def test_laws_share_choices_of_options_except_for_what_they_need() -> None:
    plain = {tuple(choice.items()) for choice, _ in cases_of(OPTION, 4)}
    assert len(plain) == 4
    for choice, _ in cases_of(CHUNKS, 4):
        assert (choice["batch"], choice["tree_mask"]) == ("prefill", "none")
        near = max(
            sum(dict(other)[name] == choice[name] for name in OPTIONS)
            for other in plain
        )
        assert near >= len(OPTIONS) - 6


def test_a_shared_choice_is_valid_whatever_a_law_needs() -> None:
    needs = [{}, {"batch": "decode"}, {"causal": "cross"}, {"tree_mask": "tree"}]
    with Reuse(8, 3).begin():
        for start in needs:
            for seed in range(30):
                choice = drawn_choice(seed, {"operation": "paged_attention"} | start)
                assert start.items() <= choice.items() and [*choice] == [*OPTIONS]
                for name, value in choice.items():
                    rest = {
                        option: its for option, its in choice.items() if option != name
                    }
                    assert value in allowed(rest, name), (start, seed, name)


def test_masks_have_few_windows_with_needles_at_their_edges() -> None:
    drawn = cases_of(WINDOWS, 4)
    assert len({(case.kind, case.size, case.block_size) for case in drawn}) == 4
    edges = [case.key_len - case.query_len + case.own - case.size for case in drawn]
    near = sum(
        abs(case.needle - edge) < 3 for case, edge in zip(drawn, edges, strict=True)
    )
    assert near > 5


def test_without_signatures_a_case_draws_from_its_own_numbers() -> None:
    pick = Random(0)
    assert compiled(pick) is pick
    with Reuse(2, 0).begin():
        drawn = {compiled(Random(seed)).random() for seed in range(20)}
    assert len(drawn) == 2 and compiled(pick) is pick


def test_a_gpu_shares_signatures_unless_it_is_told_not_to() -> None:
    assert signatures_on("cpu") is None
    assert signatures_on("cuda") == signatures_on("cuda:1") == SIGNATURES
    with pytest.raises(ValueError, match="signatures = -1: expected 0 for any"):
        check_implementation("reference", signatures=-1)


@pytest.mark.extended
@pytest.mark.parametrize("signatures", [None, 4])
def test_a_case_of_a_shared_signature_is_reported_as_it_was_tried(
    signatures: int | None,
) -> None:
    """So it can be reproduced without the number of signatures."""

    def attend(**given: Any) -> Any:
        found = SETTING.candidate.paged_attention(**given)
        return found.add_(1) if found.shape[0] > 3 else found

    candidate = Candidate("mine", {"paged_attention": attend}, Support())
    setting = make_setting(candidate, "cpu")
    result = try_law(find_law(ATTENDS), setting, 0, 30, signatures=signatures)
    assert result.status == Status.BROKEN and result.case.startswith("BatchPlan(")
