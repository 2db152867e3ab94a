"""Validation: both twins reject an input with the same error, which names what was expected.

The laws demand that bad input raises and that no tensor is written before. They leave the words to
the implementation. The words of the twins are tested here, on every bad input of the laws.
"""

import re
import sys
from typing import Any

import pytest
import torch
from conftest import TWINS
from pagetwin.conformance.generators.batches import BatchPlan, build
from pagetwin.conformance.harness import expect
from pagetwin.conformance.harness.candidate import load_candidate
from pagetwin.conformance.harness.law import Law
from pagetwin.conformance.harness.report import Status
from pagetwin.conformance.harness.runner import make_setting, try_law
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.validation import values_checked

# ranks that differ raise a RankError each, in threads, and the law reads what it says
OF_SEVERAL_RANKS = "ranks of a ring that differ are rejected"
REJECTIONS = [
    law
    for law in ALL_LAWS
    if (law.claim or "").startswith("rejects") and law.name != OF_SEVERAL_RANKS
]
Error = tuple[str, str, str]
"""The input in words, the type of the error and its message."""


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[Error]:
    """Return the list to which every error that a law expects is appended."""
    found: list[Error] = []
    expect_rejection = expect.expect_rejection

    def noted(what: str, call: Any, *rest: Any) -> None:
        def raising() -> Any:
            try:
                return call()
            except expect.INPUT_ERRORS as error:
                found.append((what, type(error).__name__, str(error)))
                raise

        expect_rejection(what, raising, *rest)

    for name, module in list(sys.modules.items()):
        if name.startswith("pagetwin.conformance") and hasattr(
            module, "expect_rejection"
        ):
            monkeypatch.setattr(module, "expect_rejection", noted)
    return found


@pytest.mark.parametrize("law", REJECTIONS, ids=lambda law: law.name)
def test_both_twins_raise_the_same_error_and_say_what_was_expected(
    law: Law, errors: list[Error], device: torch.device
) -> None:
    raised = []
    for name in ("reference", "optimized"):
        errors.clear()
        setting = make_setting(load_candidate(name), str(device))
        result = try_law(law, setting, seed_of_cases=0, examples=5)
        assert result.status == Status.HELD
        assert errors
        raised.append(list(errors))
    for one, other in zip(*raised, strict=True):
        # a kernel may lack what the reference takes, and on a host no graph is recorded
        lacks = other[1] == "NotImplementedError" or law.area == "graph_rejections"
        assert one == other or lacks, (one, other)
    for what, _, message in raised[0]:
        assert re.search(r"expected|; |is not a multiple of|has no", message), (
            what,
            message,
        )


@pytest.mark.parametrize(("setting", "read"), [("1", True), ("0", False), ("", False)])
def test_the_twin_reads_contents_only_when_told(
    setting: str, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading stops the host and is illegal while a graph is captured."""
    monkeypatch.setenv("PAGETWIN_CHECK_VALUES", setting)
    assert values_checked() == read


def good_call(device: torch.device) -> dict[str, Any]:
    """Return arguments of paged attention: two requests, 3 + 1 new tokens and 20 + 9 keys."""
    batch = build(BatchPlan((3, 1), (20, 9)), device)
    return batch.arguments() | {
        "out": torch.zeros_like(batch.query, memory_format=torch.contiguous_format)
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_twin_says_what_only_the_reference_takes(
    dtype: torch.dtype, device: torch.device
) -> None:
    arguments = good_call(device)
    with pytest.raises(NotImplementedError, match="the reference takes any"):
        TWINS["optimized"].raw.paged_attention(**arguments, compute_dtype=dtype)
    for name in ("query", "key_cache", "value_cache", "out"):
        arguments[name] = arguments[name].double()
    with pytest.raises(NotImplementedError, match=r"float64: .*the reference takes"):
        TWINS["optimized"].raw.paged_attention(**arguments)
    TWINS["reference"].raw.paged_attention(**arguments)


def test_a_head_too_large_for_the_kernel_is_refused(device: torch.device) -> None:
    plan = BatchPlan((1,), (2,), kv_heads=1, group=1, head_size=1025, block_size=2)
    batch = build(plan, device)
    words = "head_size = 1025 is more than this kernel takes in torch.float32 on"
    with pytest.raises(NotImplementedError, match=re.escape(words)):
        TWINS["optimized"].raw.paged_attention(**batch.arguments())
    TWINS["reference"].raw.paged_attention(**batch.arguments())
