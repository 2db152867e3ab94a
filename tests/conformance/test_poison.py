"""The search for the poison in an output: which slot, which request, which position."""

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pagetwin.conformance.base.child_process import BEGIN
from pagetwin.conformance.base.results import Result, Status
from pagetwin.conformance.candidates.candidate import Candidate, Support, load_candidate
from pagetwin.conformance.cases.batches import BatchPlan, build
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.running import poison
from pagetwin.conformance.running.poison import _Call, explain_nan, explain_nans
from pagetwin.conformance.running.trial import make_setting
from torch import Tensor

NAN = float("nan")
RIGHT = load_candidate("reference").operations["paged_attention"]
BATCH = build(BatchPlan((2, 1), (6, 5), block_size=4, kv_heads=1), torch.device("cpu"))
ROWS = BATCH.rows
"""Two requests with two blocks each; slots 6 and 7, and 5 to 7, are not allocated."""


def given() -> dict[str, Any]:
    """Return the arguments of a call, with tensors of its own."""
    return {
        name: argument.clone() if isinstance(argument, Tensor) else argument
        for name, argument in BATCH.arguments().items()
    }


def cause(
    kernel: Callable[..., Tensor], arguments: dict[str, Any] | None = None
) -> str:
    """Return the cause of NaN in the output of a kernel."""
    arguments = given() if arguments is None else arguments
    call = _Call(kernel, (), arguments)
    call.output = kernel(**arguments).clone()
    return call.cause()


def reading(token: int, *slots: tuple[str, int, int]) -> Callable[..., Tensor]:
    """Return a kernel that adds some slots to the right output of a token."""

    def kernel(**arguments: Any) -> Tensor:
        out: Tensor = RIGHT(**given())
        for cache, block, slot in slots:
            out[token] += arguments[cache][block, slot].sum()
        return out

    return kernel


@pytest.mark.parametrize(
    ("token", "req", "position"),
    [(0, 0, 6), (1, 0, 7), (2, 1, 5), (2, 1, 7)],
)
@pytest.mark.parametrize("cache", ["key_cache", "value_cache"])
def test_a_slot_past_the_sequence_is_named_with_its_position(
    cache: str, token: int, req: int, position: int
) -> None:
    block, slot = ROWS[req][position // 4], position % 4
    length = (6, 5)[req]
    assert cause(reading(token, (cache, block, slot))) == (
        f"the output of token {token} contains the poison of slot {slot} of block {block}"
        f" in {cache}: position {position} of request {req}, which is past its seq_len ="
        f" {length}"
    )


def test_a_block_that_no_request_uses_is_named() -> None:
    used = {block for row in ROWS for block in row}
    blocks = range(BATCH.key_cache.shape[0])
    (spare,) = [block for block in blocks if block not in used][:1]
    words = cause(reading(0, ("key_cache", spare, 1)))
    assert words.endswith("a block that no request uses")


def test_a_shared_block_is_that_of_the_own_request() -> None:
    arguments = given()
    arguments["block_table"][0, :2] = torch.tensor(ROWS[1]).int()
    kernel = reading(2, ("key_cache", ROWS[1][1], 3))
    assert "position 7 of request 1" in cause(kernel, arguments)
    kernel = reading(1, ("key_cache", ROWS[1][1], 3))
    assert "position 7 of request 0" in cause(kernel, arguments)


def test_a_block_that_is_repeated_in_a_row_is_its_last_entry() -> None:
    arguments = given()
    arguments["block_table"][1, :2] = ROWS[1][1]
    kernel = reading(2, ("key_cache", ROWS[1][1], 3))
    assert "position 7 of request 1" in cause(kernel, arguments)


def test_blocks_past_the_end_of_a_row_are_not_those_of_the_request() -> None:
    used = {block for row in ROWS for block in row}
    spare = next(n for n in range(BATCH.key_cache.shape[0]) if n not in used)
    arguments = given()
    arguments["block_table"] = torch.cat(
        [arguments["block_table"][:, :2], torch.full((2, 1), spare, dtype=torch.int32)],
        1,
    )
    words = cause(reading(0, ("key_cache", spare, 1)), arguments)
    assert words.endswith("a block that no request uses")


def test_slots_that_are_needed_together_have_no_cause() -> None:
    def kernel(**arguments: Any) -> Tensor:
        out: Tensor = RIGHT(**arguments)
        keys = arguments["key_cache"]
        both = keys[ROWS[0][1], 3].isnan().any() and keys[ROWS[1][1], 3].isnan().any()
        out[0] += NAN if both else 0.0
        return out

    assert cause(kernel) == ""


def test_an_output_that_is_not_written_is_named() -> None:
    def kernel(out: Tensor, **arguments: Any) -> Tensor:
        out[1:] = RIGHT(**arguments)[1:]
        return out

    arguments = given() | {"out": torch.full_like(BATCH.query, NAN)}
    words = cause(kernel, arguments)
    assert words == "the output of token 0 is not written everywhere"


def test_nan_of_the_kernel_itself_needs_no_poison() -> None:
    def kernel(out: Tensor, **arguments: Any) -> Tensor:
        return out.fill_(0.0).div_(0.0)

    arguments = given() | {"out": torch.full_like(BATCH.query, NAN)}
    words = cause(kernel, arguments)
    assert words == "the output of token 0 is NaN even if the caches hold no NaN"


def between(tensor: Tensor) -> Tensor:
    """Return a view of the same numbers, with NaN between them."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 1), NAN)
    wide[..., :-1] = tensor
    return wide[..., :-1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("key_cache", "around the elements of the caches"),
        ("query", "around the elements of the query"),
    ],
)
def test_poison_between_the_elements_of_a_view_is_named(name: str, words: str) -> None:
    arguments = given()
    arguments[name] = between(arguments[name])
    gap = arguments[name].shape[-1]

    def kernel(**arguments: Any) -> Tensor:
        out: Tensor = RIGHT(**arguments)
        out[0] += arguments[name].as_strided((1,), (1,), gap)
        return out

    assert words in cause(kernel, arguments)
    memory = arguments[name].as_strided((1,), (1,), gap)
    assert bool(memory.isnan().all())


def test_the_caches_are_as_before_after_the_search() -> None:
    arguments = given()
    before = [arguments[name].clone() for name in ("key_cache", "value_cache")]
    assert cause(reading(0, ("key_cache", ROWS[0][1], 2)), arguments)
    for copy, name in zip(before, ("key_cache", "value_cache"), strict=True):
        assert torch.equal(copy.isnan(), arguments[name].isnan())
        assert torch.equal(copy.nan_to_num(), arguments[name].nan_to_num())


def test_large_caches_and_outputs_without_nan_are_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def counted(**arguments: Any) -> Tensor:
        calls.append(1)
        out: Tensor = RIGHT(**arguments)
        return out

    assert cause(counted) == "" and len(calls) == 1
    monkeypatch.setattr(poison, "MAX_ELEMENTS", 8)
    assert cause(reading(0, ("key_cache", ROWS[0][1], 2))) == ""


def test_a_slot_with_some_nan_is_data() -> None:
    arguments = given()
    first, second = sorted(row[1] for row in ROWS)
    arguments["key_cache"][first, 0, 0, 0] = NAN
    kernel = reading(0, ("key_cache", first, 0), ("key_cache", second, 3))
    assert f"slot 3 of block {second}" in cause(kernel, arguments)


def test_the_last_call_before_the_failure_is_the_one_that_is_searched() -> None:
    block = ROWS[0][1]

    def paged_attention(**arguments: Any) -> Tensor:
        kernel = reading(0, ("key_cache", block, int(arguments.pop("scale"))))
        return kernel(**arguments)

    operations = {"paged_attention": paged_attention}
    setting = make_setting(Candidate("own", operations, Support()), "cpu")

    def body(setting: Any, case: int) -> None:
        for slot in (2, 3)[:case]:
            out = setting.candidate.paged_attention(**given() | {"scale": slot})
        assert not out.isnan().any() or case == 1

    law = Law("a law", "area", ("paged_attention",), (1, 2), body)
    assert "slot 3 of block" in explain_nan(law, setting, "2")
    # the law holds, so no call of it failed
    assert explain_nan(law, setting, "1") == ""


def result(status: Status = Status.BROKEN, **given: str) -> Result:
    return Result(
        **{"law": "a law", "area": "", "case": "1", "found": "nan"} | given,
        status=status,
    )  # type: ignore[arg-type]


def test_only_failures_with_nan_and_an_input_are_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[str] = []

    def search(name: str, device: str, wanted: list[Result], seconds: float) -> Any:
        searched.extend(failure.law for failure in wanted)
        return {failure.law: "found" for failure in wanted}

    monkeypatch.setattr(poison, "_search", search)
    results = [
        result(law="long", case="a longer case"),
        result(law="short"),
        result(Status.KNOWN, law="known", case="a known case"),
        result(Status.HELD, law="held"),
        result(law="no nan", found="1.5"),
        result(law="no case", case=""),
    ]
    found = explain_nans("own", "cpu", results)
    assert searched == ["short", "known", "long"]
    assert [bool(explained.cause) for explained in found] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_causes_before_a_crash_are_kept(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Process:
        """A process that says one cause and a part of another one, and does not end."""

        def communicate(
            self, text: str = "", seconds: float | None = None
        ) -> tuple[str, None]:
            """Take the request, or return what was said."""
            if seconds is not None:
                raise subprocess.TimeoutExpired("search", seconds)
            return f'noise\n{BEGIN}\n["a law", "its cause"]\n["b law", "it', None

        def kill(self) -> None:
            """End."""

    monkeypatch.setattr(poison, "start", lambda *given: Process())
    (found,) = explain_nans("own", "cpu", [result()])
    assert found.cause == "its cause"
