"""Comparators: what is found equal, what is not, and which element is shown."""

import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.conformance.base.support import OutsideSupport
from pagetwin.conformance.candidates.calls.calling import (
    declared,
    expect_right,
    expect_same_results,
    run_call,
    unchanged,
    value_size_of,
)
from pagetwin.conformance.candidates.candidate import Candidate, Support, load_candidate
from pagetwin.conformance.candidates.setting import Setting
from pagetwin.conformance.cases.batches import BatchPlan, build
from pagetwin.conformance.cases.options import Call
from pagetwin.conformance.checks import canaries
from pagetwin.conformance.checks.canaries import (
    checked_values,
    copy_of,
    expect_memory,
    expect_own_memory,
    expect_rejection_without_writes,
    kept,
    packed,
)
from pagetwin.conformance.checks.expect import (
    Disagreement,
    budgets,
    bytes_of,
    expect_budget,
    expect_rejection,
    expect_same,
    expect_untimely,
)
from pagetwin.conformance.laws.cache_gather import expect_same_numbers
from pagetwin.conformance.running.trial import make_setting
from torch import Tensor

NAN = float("nan")
CHECKED = "PAGETWIN_CHECK_VALUES"
REFERENCE = load_candidate("reference")


def disagreement(call: Callable[[], Any]) -> Disagreement:
    """Return what a comparator raises."""
    with pytest.raises(Disagreement) as raised:
        call()
    return raised.value


# exact results


@pytest.mark.parametrize(
    ("found", "right"),
    [
        (1, 2),
        (0.5, 0.25),
        (True, 1),
        (1, True),
        (None, 0),
        ([1, 2, 3], [1, 2]),
        ([1], [1, 2]),
        ([1, 3], [1, 2]),
        ("ab", ["a", "b"]),
        (5, [5]),
        (torch.tensor(3), 3),
        ([0, 0], torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, dtype=torch.int32), torch.zeros(2)),
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.bfloat16)),
        (torch.zeros(2, 1), torch.zeros(2)),
        (torch.zeros(1, 2), torch.zeros(2, 2)),
        (torch.tensor([-0.0]), torch.tensor([0.0])),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([257]), torch.tensor([1])),
        (torch.tensor([NAN, 1.0]), torch.tensor([1.0, 1.0])),
    ],
)
def test_what_differs_is_not_the_same(found: Any, right: Any) -> None:
    """Zeros of another dtype have the same bytes, if both have the same size."""
    assert (
        disagreement(lambda: expect_same("result", found, right)).what[:6] == "result"
    )


@pytest.mark.parametrize(
    "value",
    [
        *(7, 0.5, True, None, "word", [1, [2, None]], (1, 2)),
        torch.tensor([NAN, -1.0, torch.inf]),
        torch.zeros(0, 3),
        torch.zeros(2, 1, 3).transpose(0, 1),
        torch.ones(3, 4, dtype=torch.bfloat16).T,
        torch.arange(4).view(4, 1)[:, ::2],
    ],
)
def test_a_value_is_the_same_as_itself(value: Any) -> None:
    expect_same("result", value, value)


def test_a_list_may_be_a_tuple_and_its_differing_element_is_named() -> None:
    expect_same("ids", (1, 2), [1, 2])
    error = disagreement(lambda: expect_same("ids", [1, (2, 4)], [1, (2, 3)]))
    assert (error.what, error.found, error.right) == ("ids[1][1]", "4", "3")


def test_the_first_different_element_is_shown_with_both_values() -> None:
    found, right = torch.zeros(2, 3), torch.zeros(2, 3)
    found[1, 0] = found[1, 2] = 8
    error = disagreement(lambda: expect_same("slots", found, right))
    assert (error.where, error.found, error.right) == ("at [1, 0]", "8.0", "0.0")
    assert str(error) == "slots, at [1, 0]: 8.0, right is 0.0"


DECODED = torch.tensor([NAN, -0.0, 1.0, -torch.inf])


def test_decoded_numbers_are_the_same_whatever_the_sign_of_nan() -> None:
    expect_same_numbers("codes", DECODED, DECODED)
    expect_same_numbers("codes", torch.tensor([-NAN, -0.0, 1.0, -torch.inf]), DECODED)


@pytest.mark.parametrize(
    "found",
    [
        *([0.0, -0.0, 1.0, -torch.inf], [NAN, 0.0, 1.0, -torch.inf]),
        *([NAN, -0.0, NAN, -torch.inf], [NAN, -0.0, 1.0, torch.inf]),
        *([NAN], [[NAN, -0.0, 1.0, -torch.inf]]),
    ],
)
def test_decoded_numbers_differ_by_nan_sign_of_zero_infinity_and_shape(
    found: Any,
) -> None:
    disagreement(lambda: expect_same_numbers("codes", torch.tensor(found), DECODED))


def test_bytes_of_a_tensor_with_an_axis_of_size_one_are_read() -> None:
    odd = torch.arange(6, dtype=torch.int16).as_strided((1, 3), (5, 2))
    assert bytes_of(odd)[..., 0].tolist() == [[0, 2, 4]]


# results with an error budget


def compare(found: Tensor, exact: Tensor, **terms: Tensor) -> None:
    """Compare with the budget of a result that plain torch computes without an error."""
    expect_budget("output", found, exact.double(), exact.to(found.dtype), **terms)


def test_a_result_within_its_budget_is_right_and_twice_the_budget_is_not() -> None:
    exact = torch.ones(2, 3)
    compare(exact, exact)
    found = exact.clone()
    found[1, 2] += 1e-3
    error = disagreement(lambda: compare(found, exact))
    assert error.where.startswith("at [1, 2], ") and "the row's budget" in error.where
    assert (error.what, error.right) == ("output", "1.0")
    share = float(error.where.split(", ")[-1].split(" times")[0])
    compare(exact + 1e-3 / share * 0.9, exact)
    with pytest.raises(Disagreement, match="budget"):
        compare(exact + 1e-3 / share * 1.5, exact)


def test_a_result_of_another_shape_or_dtype_is_wrong() -> None:
    """Integer zeros were taken for a result that is zero."""
    zeros = torch.zeros(2, 3)
    for found in (zeros.T, zeros[:1], zeros[..., None]):
        error = disagreement(
            lambda found=found: expect_budget("output", found, zeros.double(), zeros)
        )
        assert error.where == "its shape"
    for dtype in (torch.int32, torch.float64, torch.float16):
        error = disagreement(
            lambda dtype=dtype: expect_budget(
                "output", zeros.to(dtype), zeros.double(), zeros
            )
        )
        assert (error.where, error.found) == ("its dtype", str(dtype))


def test_the_terms_of_the_budget_are_those_of_the_caller() -> None:
    exact = torch.ones(1, 4)
    found = exact + 1e-4
    with pytest.raises(Disagreement):
        compare(found, exact)
    values = torch.stack([torch.zeros(1, 4), torch.full((1, 4), 9.0)]).double()
    moved = torch.full((1, 4), 1e-3).double()
    compare(found, exact, moved_by_scores=moved, value_range=values)


def test_nan_has_no_number_of_budgets() -> None:
    found = torch.tensor([[1.0, NAN]])
    error = disagreement(lambda: compare(found, torch.ones(1, 2)))
    assert (error.where, error.found) == ("at [0, 1]", "nan")
    assert budgets(torch.inf) == budgets(NAN) == ""
    assert budgets(2.5, "its") == ", 2.5 times its budget"


# errors


def raising(error: Exception) -> Callable[[], None]:
    """Return a function that raises an error."""

    def call() -> None:
        raise error

    return call


@pytest.mark.parametrize(
    "error", [ValueError, IndexError, TypeError, NotImplementedError, KeyError]
)
def test_an_error_of_the_input_is_a_rejection(error: type[Exception]) -> None:
    expect_rejection("a negative id", raising(error("negative")))


def test_other_errors_and_results_are_not_rejection() -> None:
    with pytest.raises(ZeroDivisionError):
        expect_rejection("a negative id", raising(ZeroDivisionError()))
    with pytest.raises(OutsideSupport):
        expect_rejection("a negative id", raising(OutsideSupport("option")))
    error = disagreement(lambda: expect_rejection("a negative id", lambda: [3]))
    assert (error.what, error.found, error.right) == (
        "a negative id",
        "returned list",
        "an error",
    )


def test_a_rejected_call_has_written_nothing() -> None:
    cache = torch.zeros(3)

    def write() -> None:
        cache[1] = 5
        raise ValueError("late")

    expect_rejection("ids", raising(ValueError("at once")), {"cache": cache})
    error = disagreement(lambda: expect_rejection("ids", write, {"cache": cache}))
    assert error.what == "cache after the rejection"


def test_an_untimely_call_raises_a_runtime_error() -> None:
    expect_untimely("a second begin", raising(RuntimeError("begun")))
    with pytest.raises(NotImplementedError):
        expect_untimely("a second begin", raising(NotImplementedError()))
    with pytest.raises(ValueError, match="other"):
        expect_untimely("a second begin", raising(ValueError("other")))
    error = disagreement(lambda: expect_untimely("a second begin", lambda: None))
    assert error.right == "a RuntimeError"


# memory


def view() -> Tensor:
    """Return a view with an offset and with elements between its own."""
    return torch.arange(40.0).view(4, 10)[1:3, 2:9:3]


def test_a_copy_has_the_view_and_the_memory_around_it() -> None:
    own = view()
    copy = copy_of(own)
    assert torch.equal(copy, own)
    assert (copy.stride(), copy.storage_offset()) == (
        own.stride(),
        own.storage_offset(),
    )
    own.zero_()
    assert copy.sum() > 0


def test_a_write_into_or_around_a_view_is_found() -> None:
    for offset in (own := view()).storage_offset(), 0, 39:
        own = view()
        before = copy_of(own)
        expect_memory("output", own, before)
        own.as_strided((1,), (1,), offset).fill_(-1)
        error = disagreement(lambda own=own, b=before: expect_memory("output", own, b))
        is_own = offset == own.storage_offset()
        assert error.what == ("output" if is_own else "memory around output")


def test_what_is_only_read_is_compared_after_the_call() -> None:
    cache = view()
    with kept(cache=cache):
        cache.sum()
    with (
        pytest.raises(Disagreement, match="cache, which is only read"),
        kept(cache=cache),
    ):
        cache[0, 0] = -1
    with pytest.raises(Disagreement, match="memory around cache"), kept(cache=cache):
        cache.as_strided((1,), (1,), 3).fill_(-1)


def test_a_result_in_the_memory_of_an_input_is_found() -> None:
    given = torch.zeros(4, 3)
    expect_own_memory("rows", torch.zeros(4), given=given)
    expect_own_memory("rows", given[:0], given=given)
    for shared in (given, given[2:], given.T[1]):
        error = disagreement(
            lambda shared=shared: expect_own_memory("rows", shared, given=given)
        )
        assert error.found == "a view of given"


def test_contents_are_validated_inside_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHECKED, raising=False)
    with checked_values():
        assert os.environ[CHECKED] == "1"
    assert CHECKED not in os.environ
    monkeypatch.setenv(CHECKED, "0")
    with pytest.raises(ValueError, match="inside"), checked_values():
        raise ValueError("inside")
    assert os.environ[CHECKED] == "0"


def test_a_rejection_is_with_checked_contents_and_without_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(CHECKED, raising=False)
    cache = torch.zeros(3)

    def reject() -> None:
        if os.environ.get(CHECKED) == "1":
            raise ValueError("negative")

    def write() -> None:
        cache[1] = 5
        reject()

    expect_rejection_without_writes("ids", reject, cache=cache)
    with pytest.raises(Disagreement, match="cache, which is only read"):
        expect_rejection_without_writes("ids", write, cache=cache)
    with pytest.raises(Disagreement, match="returned NoneType"):
        expect_rejection_without_writes("ids", lambda: None, cache=cache)


def test_packed_tensors_have_no_other_strides() -> None:
    odd = torch.zeros(1, 4).as_strided((1, 2), (7, 2))
    assert packed(odd).stride() == (2, 1)
    assert packed(torch.zeros(3, 2).T).is_contiguous()


# calls


def call_of(**options: Any) -> Call:
    """Return a call of paged attention with one decode and one prefill."""
    batch = build(BatchPlan((1, 3), (5, 7), kv_heads=2, group=2), torch.device("cpu"))
    arguments = batch.arguments() | options
    shape = (1, 3), (5, 7), batch.rows
    return Call("paged_attention", arguments, torch.float32, None, False, *shape)


def setting_of(support: Support | None = None, **operations: Any) -> Setting:
    """Return a setting with some operations of the reference replaced."""
    candidate = Candidate(
        "given", REFERENCE.operations | operations, support or Support()
    )
    return make_setting(candidate, "cpu")


def answering(change: Callable[[dict[str, Any], Tensor], Any]) -> Setting:
    """Return a setting whose attention returns what a function makes of the right output."""

    def paged_attention(**given: Any) -> Any:
        return change(given, REFERENCE.operations["paged_attention"](**given))

    return setting_of(paged_attention=paged_attention)


def test_the_reference_answers_a_call() -> None:
    setting, call = setting_of(), replace(call_of(), wants_lse=True)
    found = run_call(setting, call)
    assert found[1] is not None
    expect_right(setting, call, found)


class Own(Tensor):
    """A subclass of Tensor, which could compare as it likes."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda given, out: None, "NoneType"),
        (lambda given, out: out.as_subclass(Own), "Own"),
        (lambda given, out: out[:, :1], "shape of the output"),
        (lambda given, out: out.double(), "dtype of the output"),
        (lambda given, out: out.to("meta"), "device of the output"),
        (lambda given, out: given["query"].zero_(), "memory of query"),
        (lambda given, out: (out, given["block_table"].add_(1))[0], "block_table"),
    ],
)
def test_an_output_that_is_none_and_changed_arguments_are_found(
    change: Any, words: str
) -> None:
    error = disagreement(lambda: run_call(answering(change), call_of()))
    assert words in f"{error.what} {error.found}"


def test_the_memory_around_an_argument_must_not_change() -> None:
    def spoil(given: dict[str, Any], out: Tensor) -> Tensor:
        keys = given["key_cache"]
        keys.as_strided((1,), (1,), 0).fill_(3.0)
        return out

    call = call_of()
    wide = torch.zeros(3, *call.arguments["key_cache"].shape)
    wide[1] = call.arguments["key_cache"]
    call = call.changed(key_cache=wide[1])
    error = disagreement(lambda: run_call(answering(spoil), call))
    assert error.what == "memory of key_cache, which is only read"


def test_a_given_output_is_the_one_that_is_filled() -> None:
    call = replace(call_of(), out_dtype=torch.float32)

    def elsewhere(given: dict[str, Any], out: Tensor) -> Tensor:
        return out.clone()

    error = disagreement(lambda: run_call(answering(elsewhere), call))
    assert (error.found, error.right) == ("another tensor", "out")

    def reshaped(given: dict[str, Any], out: Tensor) -> Tensor:
        return out.view(1, *out.shape)

    found, _ = run_call(answering(reshaped), call)
    assert found.shape == call.query.shape


def test_an_lse_that_is_not_written_is_nan() -> None:
    def without_lse(given: dict[str, Any], out: Tensor) -> Tensor:
        given["lse"].fill_(NAN)
        return out

    seen = []

    def look(**given: Any) -> Any:
        seen.append(given["lse"].isnan().all())
        return REFERENCE.operations["paged_attention"](**given)

    call = replace(call_of(), wants_lse=True)
    run_call(setting_of(paged_attention=look), call)
    assert seen == [True]
    setting = answering(without_lse)
    error = disagreement(lambda: expect_right(setting, call, run_call(setting, call)))
    assert (error.what, error.found) == ("log-sum-exp", "nan")


def test_the_worst_element_of_a_wrong_output_is_shown_in_the_scale_of_the_output() -> (
    None
):
    setting, call = setting_of(), replace(call_of(), wants_lse=True)
    out, lse = run_call(setting, call)
    wrong = out.clone()
    wrong[2, 1, 3] += 1.0
    error = disagreement(lambda: expect_right(setting, call, (wrong, lse)))
    size = out.shape[-1]
    assert error.where.startswith(f"at token 2, element {size + 3} of its heads, ")
    assert float(error.found) == pytest.approx(float(error.right) + 1, abs=1e-5)
    assert error.failure is not None
    slight = out + 1e-4
    with pytest.raises(Disagreement, match="budget"):
        expect_right(setting, call, (slight, lse))


def test_a_wrong_lse_is_shown_and_infinities_that_agree_are_not() -> None:
    setting, call = setting_of(), replace(call_of(), wants_lse=True)
    out, lse = run_call(setting, call)
    assert lse is not None
    answer = call.answer()
    answer.lse[0, 1] = -torch.inf
    wrong = lse.clone()
    wrong[0, 1] = -torch.inf
    wrong[3, 2] += 1e-2
    error = disagreement(lambda: expect_right(setting, call, (out, wrong), answer))
    assert (error.what, error.where.partition(",")[0]) == ("log-sum-exp", "at [3")
    assert error.where.startswith("at [3, 2], ") and "its budget" in error.where
    error = disagreement(lambda: expect_right(setting, call, (out, lse.double())))
    assert error.what == "dtype of the log-sum-exp"


def test_two_results_are_compared_bit_by_bit() -> None:
    one = (torch.ones(2, 1, 1), torch.ones(1, 2))
    expect_same_results("again", one, one)
    for other in ((one[0] + 1e-7, one[1]), (one[0], one[1] + 1e-7)):
        with pytest.raises(Disagreement, match="again"):
            expect_same_results("again", other, one)
    expect_same_results("again", one, (one[0], None))


def test_the_size_of_values_is_their_own() -> None:
    call = call_of()
    narrow = call.arguments["value_cache"][..., :3]
    assert value_size_of(call.changed(value_cache=narrow)) == 3
    ragged = SimpleNamespace(arguments={"key": torch.ones(4, 2, 8), "value": narrow[0]})
    assert value_size_of(ragged) == 3  # type: ignore[arg-type]


def test_only_declared_outputs_are_requested() -> None:
    call = replace(call_of(), wants_lse=True, out_dtype=torch.float32)
    own = Support(options=["scale"])
    found = declared(setting_of(own), call)
    assert not found.wants_lse and found.out_dtype is None
    found = declared(setting_of(Support(options=["lse", "out"])), call)
    assert found.wants_lse and found.out_dtype is not None
    # an output of another dtype has to be given
    other = replace(call, out_dtype=torch.bfloat16)
    assert declared(setting_of(own), other).out_dtype == torch.bfloat16


def test_a_bound_past_the_declared_lengths_becomes_the_longest_length() -> None:
    narrow = Support(query_lens=range(4), seq_lens=range(9))
    call = call_of(max_query_len=8, max_seq_len=99)
    found = declared(setting_of(narrow), call).arguments
    assert (found["max_query_len"], found["max_seq_len"]) == (3, 7)
    call = call_of(max_query_len=3, max_seq_len=8)
    found = declared(setting_of(narrow), call).arguments
    assert (found["max_query_len"], found["max_seq_len"]) == (3, 8)


def test_memory_that_is_too_large_to_copy_is_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(canaries, "MOST_BYTES", 8)
    small, large = torch.zeros(2), torch.zeros(3)
    with unchanged({"large": large}):
        large += 1
    with pytest.raises(Disagreement, match="small"), unchanged({"small": small}):
        small += 1


def test_unchanged_arguments_may_share_memory_and_be_empty() -> None:
    base = torch.arange(6.0)
    given = {
        "a": base[:3],
        "b": base[3:],
        "c": base[:0],
        "n": 3,
        "m": torch.ones(2, device="meta"),
    }
    with unchanged(given):
        pass
    with (
        pytest.raises(Disagreement, match="memory of a, which is only read"),
        unchanged(given),
    ):
        base[5] = 0
