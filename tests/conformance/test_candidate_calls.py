"""Calls of a candidate: what is counted, left out, converted, and outside of the support."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pagetwin.conformance.candidates import candidate as module
from pagetwin.conformance.candidates.candidate import (
    Candidate,
    OutsideSupport,
    Support,
    is_undeclared,
)
from pagetwin.contract.attention_options import AttentionOptions
from small_kernels import CALL, OPTIONS, Kernel, candidate

CUDA = torch.device("cuda")


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


# access


def test_calls_and_accesses_are_counted(kernel: Kernel) -> None:
    own = candidate(kernel.named)
    assert own.paged_attention(**CALL) == "result"
    assert own.paged_attention is own.paged_attention
    assert (own.accesses, own.calls, own.calls_outside) == (3, 3, 0)
    other = own.with_operations(paged_attention=kernel.whole)
    other.paged_attention(**CALL, options=OPTIONS)
    assert kernel.calls[-1]["options"] is OPTIONS and own.accesses == 4
    limited = candidate(kernel.named, Support(head_sizes=[8]))
    limited.paged_attention(**CALL)
    assert (limited.accesses, limited.calls, limited.calls_outside) == (1, 1, 0)


def test_a_replaced_operation_is_called_and_the_others_stay(kernel: Kernel) -> None:
    own = candidate(kernel.named)
    own.paged_attention(**CALL)
    own.operations["paged_attention"] = lambda **given: "other"
    assert own.paged_attention(**CALL) == "other"
    more = own.with_operations(blocks_needed=max)
    assert more.operations.keys() == {"paged_attention", "blocks_needed"}
    assert more.with_operations(blocks_needed=min).operations["blocks_needed"] is min


def test_classes_and_values_are_as_they_are() -> None:
    operations = {"BACKENDS": {"a": 1}, "Scheduler": Kernel}
    for support in (Support(), Support(head_sizes=[8])):
        own = Candidate("own", operations, support)
        assert own.BACKENDS is operations["BACKENDS"] and own.Scheduler is Kernel
        assert own.accesses == 2 and own.calls == 0
    assert repr(own) == "Candidate('own')"


def test_what_is_missing_is_outside_only_if_it_is_an_undeclared_operation() -> None:
    own = Candidate("own", {}, Support(operations=["blocks_needed"]))
    with pytest.raises(OutsideSupport, match="needs paged_attention, which is not"):
        _ = own.paged_attention
    for name in ("blocks_needed", "no_operation"):
        with pytest.raises(AttributeError, match=f"own has no {name}"):
            getattr(own, name)
    with pytest.raises(AttributeError):
        _ = Candidate("own", {}, Support()).paged_attention
    declared = Support(operations=["blocks_needed"])
    assert is_undeclared("BACKENDS", declared) and not is_undeclared("other", declared)
    assert not is_undeclared("blocks_needed", declared)


@pytest.mark.parametrize("support", [Support(), Support(head_sizes=[8])])
def test_calls_on_a_gpu_are_waited_for_outside_of_captures(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel, support: Support
) -> None:
    waits, is_capturing = [], [False]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0]
    )
    own = candidate(kernel.named, support)
    own.paged_attention(**CALL)
    own.on(torch.device("cpu")).paged_attention(**CALL)
    assert not waits
    there = own.on(CUDA)
    assert there.paged_attention(**CALL) == "result" and len(waits) == 1
    there.without_waiting().paged_attention(**CALL)
    is_capturing[0] = True
    there.paged_attention(**CALL)
    assert len(waits) == 1


# options and limits


def test_options_are_given_as_the_function_takes_them(kernel: Kernel) -> None:
    for support in (Support(), Support(head_sizes=[8])):
        candidate(kernel.named, support).paged_attention(**CALL, options=OPTIONS)
        assert kernel.calls[-1]["sliding_window"] == 3
        assert "options" not in kernel.calls[-1]
        candidate(kernel.whole, support).paged_attention(**CALL, options=OPTIONS)
        assert kernel.calls[-1]["options"] == OPTIONS
        candidate(kernel.named, support).paged_attention(**CALL)
        assert "sliding_window" not in kernel.calls[-1]
    # operations without options get none
    assert module.with_keywords("blocks_needed", max) is max


def test_options_that_a_function_lacks_are_left_out_if_they_are_off(
    kernel: Kernel,
) -> None:
    own = candidate(kernel.few, Support(head_sizes=[8], options=["scale"]))
    lens = Support(head_sizes=[8])
    assert own.paged_attention(**CALL, scale=2.0, out=None) == "result"
    assert kernel.calls == [{"scale": 2.0}]
    with pytest.raises(TypeError):
        candidate(kernel.few, lens).paged_attention(**CALL, lse=torch.zeros(4, 3))
    with pytest.raises(OutsideSupport, match="option lse"):
        own.outside().paged_attention(**CALL, lse=torch.zeros(4, 3))
    candidate(kernel.named, lens).paged_attention(**CALL, lse=None)
    assert kernel.calls[-1]["lse"] is None


def test_calls_outside_are_made_only_if_they_are_requested(kernel: Kernel) -> None:
    own = candidate(kernel.named, Support(head_sizes=[16]))
    with pytest.raises(OutsideSupport, match=r"^head size 8$"):
        own.paged_attention(**CALL)
    assert not kernel.calls and own.calls == 0
    beyond = own.outside()
    assert beyond.paged_attention(**CALL) == "result"
    assert (own.calls, own.calls_outside) == (1, 1)
    kernel.error = KeyError("what it likes")
    with pytest.raises(OutsideSupport, match=r"^head size 8$"):
        beyond.paged_attention(**CALL)
    kernel.error = torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError):
        beyond.paged_attention(**CALL)
    kernel.error = KeyError("of the kernel")
    inside = beyond.with_support(Support(head_sizes=[8]))
    with pytest.raises(KeyError, match="of the kernel"):
        inside.paged_attention(**CALL)
    assert own.calls_outside == 3


def test_arguments_that_the_operation_lacks_reach_the_function(kernel: Kernel) -> None:
    own = candidate(kernel.named, Support(head_sizes=[16]))
    kernel.error = TypeError("unexpected argument")
    with pytest.raises(TypeError, match="unexpected argument"):
        own.paged_attention(**CALL, other=1)
    assert own.calls == 1


def test_tensors_are_converted_where_they_are_given(kernel: Kernel) -> None:
    sinks = torch.ones(4)
    support = Support(
        tensor_dtypes={name: ["bfloat16"] for name in ("sinks", "alibi_slopes", "lse")}
    )
    options = AttentionOptions(sinks=sinks, alibi_slopes=sinks)
    candidate(kernel.whole, support).paged_attention(**CALL, options=options)
    found = kernel.calls[-1]["options"]
    assert found.sinks.dtype == found.alibi_slopes.dtype == torch.bfloat16
    candidate(kernel.named, support).paged_attention(**CALL, options=options, lse=sinks)
    for name in ("sinks", "alibi_slopes", "lse"):
        assert kernel.calls[-1][name].dtype == torch.bfloat16
    candidate(kernel.named, support).paged_attention(**CALL)
    assert "sinks" not in kernel.calls[-1]


# claims


def test_a_claim_is_asked_for_where_the_support_says_something() -> None:
    own = candidate(print)
    assert own.why_unclaimed(None) is None
    for rejects, what, is_claimed in (
        (None, "shapes", True),
        ([], "shapes", False),
        (["contents"], "contents", True),
        (["contents"], "shapes", False),
    ):
        why = own.with_support(Support(rejects=rejects)).why_unclaimed(
            f"rejects {what}"
        )
        assert (why is None) == is_claimed


def test_batch_invariance_is_a_function_an_argument_or_an_option(
    kernel: Kernel,
) -> None:
    def invariant(own: Candidate) -> Any:
        found = own.batch_invariant()
        return found and found.operations["paged_attention"]

    def with_argument(query: Any, batch_invariant: bool = False) -> bool:
        return batch_invariant

    assert Candidate("own", {}, Support()).batch_invariant() is None
    assert invariant(candidate(print, Support(batch_invariant=max))) is max
    assert invariant(candidate(print, Support(batch_invariant=True))) is print
    assert invariant(candidate(with_argument))(None) is True
    assert invariant(candidate(kernel.named)) is None
    assert invariant(candidate(kernel.whole, Support(options=["scale"]))) is None
    for options in (None, ["batch_invariant"]):
        found = invariant(candidate(kernel.whole, Support(options=options)))
        found(options=OPTIONS)
        assert kernel.calls[-1]["options"] == replace(OPTIONS, batch_invariant=True)
