"""Fitting: the nearest case inside of the declared support keeps what the support allows."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from pagetwin.conformance import Support
from pagetwin.conformance.candidates import fitting
from pagetwin.conformance.candidates.fitting import fit_case, fit_signature
from pagetwin.conformance.cases.batches import BatchPlan
from pagetwin.conformance.cases.option_pairs import PLAIN
from pagetwin.conformance.cases.rank_signatures import (
    draw_rank_batch,
    draw_rank_signature,
)
from pagetwin.conformance.cases.ranks import STEP
from pagetwin.conformance.cases.signatures import SMALL, draw_batch, draw_signature

PLAN = BatchPlan((3, 1), (5, 9))
SCALES = ["k_scale", "v_scale"]


@dataclass(frozen=True)
class Pair:
    plan: BatchPlan
    number: int = 3


class Own:
    """A case with its own way into the support."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and other.size == self.size

    __hash__ = None  # type: ignore[assignment]

    def within(self, support: Support) -> "Own":
        return Own(min(self.size, 8))


def choice(**changes: str) -> dict[str, str]:
    return dict(PLAIN) | changes


# what is inside


def test_a_case_inside_is_the_same_object() -> None:
    everything = Support()
    signature = draw_signature(0, SMALL)
    cases = [PLAN, choice(), signature, draw_batch(signature, 0), Own(3)]
    for case in [*cases, tuple(cases), Pair(PLAN), Pair, "text", {"a": 1}]:
        assert fit_case(case, everything) is case
    assert fit_signature(signature, everything) is signature


def test_parts_of_a_case_are_fitted() -> None:
    narrow = Support(query_lens=range(2))
    inside = replace(PLAN, query_lens=(1, 1))
    assert fit_case((PLAN, 3), narrow) == (inside, 3)
    assert fit_case(Pair(PLAN, 4), narrow) == Pair(inside, 4)
    assert fit_case(Own(20), narrow) == Own(8)


def test_what_ranks_take_is_not_declared() -> None:
    signature = draw_rank_signature(0, SMALL, STEP)
    batch = draw_rank_batch(signature, 0)
    narrow = Support(query_lens=[1], head_sizes=[333], options=[])
    assert fit_signature(signature, narrow) is signature
    assert fit_case(batch, narrow) is batch


# plans


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({"query_lens": range(3)}, {"query_lens": (2, 1)}),
        (
            {"query_lens": [8], "seq_lens": range(9)},
            {"query_lens": (8, 8), "kv_lens": (8, 8)},
        ),
        ({"seq_lens": range(7)}, {"kv_lens": (5, 6)}),
        ({"block_sizes": [24]}, {"block_size": 24}),
        ({"group_sizes": [7]}, {"group": 7}),
        ({"dtypes": ["float16"]}, {"dtype": torch.float16}),
        ({"dtypes": ["float64"]}, {}),
        ({"kv_layouts": ["HND"]}, {"layout": "hnd"}),
    ],
)
def test_a_plan_changes_what_is_not_supported(
    fields: dict[str, Any], changes: dict[str, Any]
) -> None:
    plan = replace(PLAN, layout="separate")
    found = fit_case(plan, Support(**fields))
    for name, value in changes.items():
        assert getattr(found, name) == value
    assert found == replace(plan, **changes)


def test_a_scale_is_kept_with_its_head_size_and_if_it_is_supported() -> None:
    plan = replace(PLAN, scale=0.3)
    for fields, scale in (
        ({"group_sizes": [7]}, 0.3),
        ({"head_sizes": [plan.head_size + 8]}, None),
        ({"options": []}, None),
        ({"options": ["scale"]}, 0.3),
    ):
        assert fit_case(plan, Support(**fields)).scale == scale


def test_a_fused_query_and_other_strides_of_values_need_support() -> None:
    plan = replace(PLAN, layout="separate", value_layout="padded", fused=True)
    for fields, value_layout, fused in (
        ({"group_sizes": [7]}, "padded", True),
        ({"strides": {"query": "packed"}}, "padded", False),
        ({"same_strides": [("key_cache", "value_cache")]}, None, True),
    ):
        found = fit_case(plan, Support(**fields))
        assert (found.value_layout, found.fused) == (value_layout, fused)


def test_values_take_turns_by_the_seed() -> None:
    support = Support(block_sizes=[24, 40])
    found = {
        fit_case(replace(PLAN, seed=seed), support).block_size for seed in range(2)
    }
    assert found == {24, 40}
    assert fitting._nearest(24, [40, 24], 0) == 24


# choices


@pytest.mark.parametrize(
    ("fields", "given", "fitted"),
    [
        ({"block_sizes": [24]}, {}, {"block_size": "24"}),
        ({"group_sizes": [7]}, {}, {"group": "7"}),
        ({"head_sizes": [72]}, {"scale": "0.3"}, {"head_size": "72", "scale": "none"}),
        ({"query_lens": range(6)}, {"batch": "mixed"}, {"batch": "verification"}),
        ({"query_lens": [1]}, {"batch": "mixed"}, {"batch": "decode"}),
        ({"query_lens": range(6)}, {"batch": "decode"}, {"batch": "decode"}),
        ({"query_lens": [2]}, {"batch": "mixed"}, {"batch": "decode"}),
        ({"strides": {"query": "packed"}}, {"query": "fused"}, {"query": "apart"}),
        (
            {"kv_layouts": ["HND"]},
            {"layout": "separate"},
            {"layout": "interleaved hnd"},
        ),
        ({"options": []}, {"sliding_window": "7"}, {"sliding_window": "none"}),
        ({"options": []}, {"lse": "given"}, {"lse": "none", "out": "made"}),
        ({"options": ["out"]}, {"out": "given"}, {"out": "given"}),
        (
            {"options": SCALES, "cache_dtypes": ["float8_e5m2"]},
            {"cache": "e4m3", "scales": "numbers"},
            {"cache": "as the query", "scales": "none"},
        ),
        (
            {"options": ["lse"]},
            {"cache": "e4m3", "scales": "numbers"},
            {"cache": "as the query", "scales": "none"},
        ),
        (
            {"options": {"k_scale": "per head", "v_scale": "per head"}},
            {"cache": "e4m3", "scales": "numbers"},
            {"cache": "e4m3", "scales": "each head"},
        ),
    ],
)
def test_a_choice_changes_what_is_not_supported(
    fields: dict[str, Any], given: dict[str, str], fitted: dict[str, str]
) -> None:
    found = fit_case(choice(**given), Support(**fields))
    assert {name: found[name] for name in fitted} == fitted


def test_of_options_that_cannot_be_combined_the_last_is_left_out() -> None:
    pair = Support(options=["sinks", "scale"], never_together=[("sinks", "scale")])
    sinks = next(value for value in fitting.OPTIONS["sinks"].values[1:])
    both = choice(sinks=sinks, scale="0.3")
    found = fit_case(both, pair)
    assert (found["sinks"], found["scale"]) == (sinks, "none")
    one = fit_case(choice(scale="0.3"), pair)
    assert one["scale"] == "0.3"


def test_a_flag_is_off_where_it_is_that_of_the_operation() -> None:
    assert fitting._option(choice(causal="yes"), "causal") == {}
    assert fitting._option(choice(causal="no"), "causal") == {"causal": False}
    encoder = choice(operation="encoder_attention", causal="no")
    assert fitting._option(encoder, "causal") == {}
    other = fitting.OPTIONS["value_head_size"].values[1]
    sized = choice(head_size="64", value_head_size=other)
    assert fitting._option(sized, "value_head_size") == {"value_head_size": 69}
    assert fitting._option(choice(), "value_head_size") == {}


# batches of a signature


def test_a_batch_has_lengths_of_the_support_and_needles_among_its_keys() -> None:
    support = Support(query_lens=range(2), seq_lens=range(7))
    changed = 0
    for seed in range(30):
        batch = draw_batch(draw_signature(seed, SMALL), 0)
        found = fit_case(batch, support)
        changed += found is not batch
        assert found.signature.max_query_len >= max((*found.query_lens, 0))
        crosses = found.signature.choice["causal"] == "cross"
        for new, keys, needle in zip(
            found.query_lens, found.key_lens, found.needles, strict=True
        ):
            assert new <= 1 and keys <= 6 and needle < max(keys, 1)
            assert crosses or keys >= new
        assert fit_case(found, support) is found
    assert changed > 20
    decode = fit_signature(draw_signature(0, SMALL), Support(query_lens=[1]))
    assert decode.choice["batch"] == "decode" and decode.max_query_len == 1
