"""Edges of laws: cases that are always tried, so that a fault there is found with any seed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from pagetwin.conformance.base.results import Status
from pagetwin.conformance.candidates.candidate import Candidate, Support, load_candidate
from pagetwin.conformance.laws import masks
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.running import trial
from pagetwin.conformance.running.trial import make_setting, try_law
from pagetwin.contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from torch import Tensor

REFERENCE = load_candidate("reference")
SEEDS = range(4)
Change = Callable[[AttentionOptions], dict[str, Any]]


def shifted(options: AttentionOptions, side: int, by: int) -> dict[str, Any]:
    """Return query ranges whose first or last positions are moved."""
    ranges = options.query_ranges
    if ranges is None:
        return {}
    moved = ranges.clone()
    moved[:, side] = torch.where(
        ranges[:, side] < 0, ranges[:, side], ranges[:, side] + by
    )
    return {"query_ranges": moved}


def grown(name: str, by: int) -> Change:
    """Return a change of a window or a chunk by some keys."""

    def change(options: AttentionOptions) -> dict[str, Any]:
        size = getattr(options, name)
        return {} if size is None else {name: max(1, size + by)}

    return change


def without_siblings(options: AttentionOptions) -> dict[str, Any]:
    tree = options.tree_mask
    return {} if tree is None else {"tree_mask": torch.ones_like(tree).tril()}


def without_flags(options: AttentionOptions) -> dict[str, Any]:
    return {"causal": True} if isinstance(options.causal, Tensor) else {}


@pytest.fixture(autouse=True)
def not_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the first failing case."""
    monkeypatch.setattr(trial, "SECONDS_TO_SHRINK", 0.0)


FAULTS: dict[str, Change] = {
    "a window is one too wide": grown("sliding_window", 1),
    "a window is one too narrow": grown("sliding_window", -1),
    "a chunk is one too long": grown("attention_chunk_size", 1),
    "a chunk is one too short": grown("attention_chunk_size", -1),
    "a range ends one early": lambda options: shifted(options, 1, -1),
    "a range ends one late": lambda options: shifted(options, 1, 1),
    "a range begins one late": lambda options: shifted(options, 0, 1),
    "siblings are visible": without_siblings,
    "flags are ignored": without_flags,
}


def is_broken(sentence: str, operations: dict[str, Any], seed: int) -> bool:
    """Return whether a law breaks on its edges and one drawn case."""
    (law,) = [law for law in ALL_LAWS if law.name == sentence]
    candidate = Candidate("broken", REFERENCE.operations | operations, Support())
    result = try_law(law, make_setting(candidate, "cpu"), seed, 1)
    assert result.status != Status.OUTSIDE
    return result.status == Status.BROKEN


MASKS = [
    law.name
    for law in ALL_LAWS
    if law.area == "masks" and law.edges and law.needs == ("paged_attention",)
]


def masked(fault: Change, operation: str) -> Callable[..., Any]:
    """Return an operation of the reference with other masks."""
    right = REFERENCE.operations[operation]

    def attend(
        *args: Any, options: AttentionOptions = DEFAULT_OPTIONS, **given: Any
    ) -> Any:
        return right(*args, options=replace(options, **fault(options)), **given)

    return attend


@pytest.mark.extended
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_mask_is_found_with_any_seed(fault: str, seed: int) -> None:
    """Three drawn cases missed it with some seeds."""
    operations = {"paged_attention": masked(FAULTS[fault], "paged_attention")}
    assert len(MASKS) == 4
    assert any(is_broken(name, operations, seed) for name in MASKS)


def latents(name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return an operation over latents with changed arguments."""
    right = REFERENCE.operations[name]

    def attend(**given: Any) -> Any:
        return right(**given | change(given))

    return {name: attend}


def without_rope(given: dict[str, Any]) -> dict[str, Any]:
    return {"q_pe": torch.zeros_like(given["q_pe"])}


def with_rope_of_the_first_head(given: dict[str, Any]) -> dict[str, Any]:
    return {"q_pe": given["q_pe"][:, :1].expand_as(given["q_pe"])}


def without_latent(given: dict[str, Any]) -> dict[str, Any]:
    return {"q_nope": torch.zeros_like(given["q_nope"])}


LATENTS = {
    "latent_decode_attention": (
        "a decode over latents is full multi head attention",
        "a decode over latents attends to its window only",
    ),
    "latent_prefill_attention": (
        "a prefill over latents is full multi head attention",
    ),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("operation", LATENTS)
@pytest.mark.parametrize(
    "fault", [without_rope, with_rope_of_the_first_head, without_latent]
)
def test_a_fault_of_the_rope_part_is_found_with_any_seed(
    fault: Any, operation: str, seed: int
) -> None:
    for name in LATENTS[operation]:
        assert is_broken(name, latents(operation, fault), seed), name


def test_edges_are_tried_before_what_is_drawn() -> None:
    seen: list[int] = []

    def body(setting: Any, case: int) -> None:
        assert setting.candidate.paged_attention
        seen.append(case)

    law = Law("a law", "area", ("paged_attention",), st.integers(0, 9), body)
    law = replace(law, edges=(77, 78))
    result = try_law(law, make_setting(REFERENCE, "cpu"), 0, 3)
    assert seen[:2] == [77, 78] and result.cases == len(seen) == 5
    seen.clear()
    try_law(replace(law, cases=[1, 2]), make_setting(REFERENCE, "cpu"), 0, 3)
    assert seen == [77, 78, 1, 2]


def test_edges_have_each_kind_of_mask() -> None:
    assert {case.kind for case in masks.EDGES} == set(masks.KINDS)
    for group in masks.ALIKE:
        assert {case.kind for case in masks.edges_of(group)} == set(group)
