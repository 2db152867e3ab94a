"""Validation: both twins reject an input with the same error, which names what was expected.

The laws demand that bad input raises and that no tensor is written before. They leave the words to
the implementation. The words of the twins are tested here, on every bad input of the laws.
"""

import re
import sys
from typing import Any

import pytest
import torch
from pagetwin.conformance.api.check import make_setting, try_law
from pagetwin.conformance.base.results import Status
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.cases.batches import BatchPlan, build
from pagetwin.conformance.checks import expect
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.conformance.laws.law import Law
from pagetwin.optimized.runtime import attention_call
from pagetwin.optimized.runtime.repeat import signatures
from pagetwin.validation import values_checked
from support.twins import TWINS, WITHOUT_GPU
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.quick

# ranks that differ raise a RankError each, in threads, and the law reads what it says
OF_SEVERAL_RANKS = "ranks of a ring that differ are rejected"
# its errors are among those of laws that give their own inputs
OF_ALL_ARGUMENTS = "a call that raises has changed nothing"
REJECTIONS = [
    law
    for law in ALL_LAWS
    if (law.claim or "").startswith("rejects")
    and law.name not in (OF_SEVERAL_RANKS, OF_ALL_ARGUMENTS)
]
AXES = {
    "query": 3,
    "key_cache": 4,
    "value_cache": 4,
    "block_table": 2,
    "query_start_loc": 1,
    "seq_lens": 1,
}
"""Axes of each tensor of paged attention."""
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


@pytest.mark.sample(10)
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


@pytest.mark.parametrize(
    ("name", "axes"),
    [(name, axes) for name in AXES for axes in range(6) if axes != AXES[name]],
)
def test_a_call_that_a_gpu_may_repeat_is_validated_before_its_shapes_are_read(
    name: str, axes: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of one axis raised IndexError where calls are signed: tuple index out of range."""
    for module in (attention_call, signatures):
        monkeypatch.setattr(module, "INTERPRETED", False)
    good = good_call(device)
    tensor = good[name]
    changed = {name: tensor.new_ones((2,) * axes)}
    for operation, more in (
        ("paged_attention", {}),
        ("cascade_attention", {"common_prefix_len": 0}),
    ):
        found = []
        for twin in TWINS.values():
            with pytest.raises((ValueError, TypeError)) as raised:
                getattr(twin.raw, operation)(**(good | more | changed))
            found.append(str(raised.value))
        assert found[0] == found[1] and "expected" in found[0]


@pytest.mark.parametrize(
    ("setting", "on_cpu", "on_cuda"),
    [("1", True, True), ("0", False, False), (None, True, False), ("", True, False)],
)
def test_the_twin_reads_contents_on_the_cpu_unless_told(
    setting: str | None, on_cpu: bool, on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading waits for a GPU and is illegal while a graph is captured."""
    monkeypatch.delenv("PAGETWIN_CHECK_VALUES", raising=False)
    if setting is not None:
        monkeypatch.setenv("PAGETWIN_CHECK_VALUES", setting)
    assert values_checked(torch.device("cpu")) == on_cpu
    assert values_checked(torch.device("cuda", 0)) == on_cuda
    assert values_checked(torch.zeros(1)) == on_cpu


def test_another_setting_of_contents_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was taken for none, and a user who wrote `true` had nothing checked on a GPU."""
    monkeypatch.setenv("PAGETWIN_CHECK_VALUES", "true")
    with pytest.raises(ValueError, match="PAGETWIN_CHECK_VALUES = 'true': expected 1"):
        values_checked(torch.zeros(1))


@pytest.mark.extended
def test_tensors_without_numbers_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors, those of the device meta, and those that a compiler traces."""
    monkeypatch.delenv("PAGETWIN_CHECK_VALUES", raising=False)
    assert not values_checked(torch.zeros(1, device="meta"))
    with FakeTensorMode() as mode:
        assert not values_checked(mode.from_tensor(torch.zeros(1)))

    def read(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + (2 if values_checked(tensor) else 1)

    traced = torch.compile(read, fullgraph=True, backend="eager")
    assert traced(torch.zeros(1)).tolist() == [1.0]


CONTENTS: dict[str, dict[str, Any]] = {
    "slots of a cache of 32": {"slot_mapping": [9, 1000]},
    "two tokens in one slot": {"slot_mapping": [9, 9]},
    "a block of 8": {"block_table": [[1, 2], [3, 99]]},
    "a bound": {"max_seq_len": 5},
    "a number of new tokens": {"query_start_loc": [0, 1, 3]},
}
"""Contents that are out of range: a kernel would read or write outside of the cache."""


@WITHOUT_GPU
@pytest.mark.parametrize("what", CONTENTS)
def test_both_twins_validate_contents_on_the_cpu_by_default(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong slot ended the interpreter's process with a segmentation fault."""
    monkeypatch.delenv("PAGETWIN_CHECK_VALUES", raising=False)
    cache = torch.zeros(2, 8, 4, 2, 16)
    (changed,) = CONTENTS[what].items()
    found = []
    for twin in TWINS.values():
        new, kind = torch.ones(2, 2, 16), torch.int32
        given: dict[str, Any] = {
            "query": new,
            "key_cache": cache[0],
            "value_cache": cache[1],
            "block_table": [[1, 2], [3, 4]],
            "query_start_loc": [0, 1, 2],
            "seq_lens": [3, 6],
            "max_query_len": 1,
            "max_seq_len": 8,
        }
        call = twin.raw.paged_attention
        if changed[0] == "slot_mapping":
            given = {"key": new, "value": new, "key_cache": cache[0]}
            given |= {"value_cache": cache[1], "slot_mapping": [9, 10]}
            call, kind = twin.raw.reshape_and_cache, torch.int64

        def tensors(arguments: dict[str, Any], kind: torch.dtype = kind) -> Any:
            return {
                name: torch.tensor(argument, dtype=kind)
                if isinstance(argument, list)
                else argument
                for name, argument in arguments.items()
            }

        call(**tensors(given))
        before = cache.clone()
        with pytest.raises((IndexError, ValueError)) as raised:
            call(**tensors(given | dict([changed])))
        assert torch.equal(cache, before)
        found.append(str(raised.value))
    assert found[0] == found[1] and "expected" in found[0]


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


def test_a_head_too_large_for_the_kernel_is_rejected(device: torch.device) -> None:
    plan = BatchPlan((1,), (2,), kv_heads=1, group=1, head_size=1025, block_size=2)
    batch = build(plan, device)
    words = "head_size = 1025 is more than this kernel takes in torch.float32 on"
    with pytest.raises(NotImplementedError, match=re.escape(words)):
        TWINS["optimized"].raw.paged_attention(**batch.arguments())
    TWINS["reference"].raw.paged_attention(**batch.arguments())
