"""Candidates from modules, files and solutions: what is imported, searched, and guarded."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.conformance.candidates import candidate as module
from pagetwin.conformance.candidates.candidate import (
    Candidate,
    OutsideSupport,
    Support,
    arguments_with_default,
    load_candidate,
    why_outside,
)
from pagetwin.conformance.flashinfer_bench import adapter
from pagetwin.contract.attention_options import AttentionOptions
from small_kernels import CALL, Kernel, candidate

ATTENDS = "def paged_attention(): return 'own'\n"
Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Return a function that writes a module, and let no import of it stay."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write_module(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    yield write_module
    for name in [
        module_name for module_name in sys.modules if module_name.startswith("loaded_")
    ]:
        del sys.modules[name]


def test_a_file_is_found_in_its_own_folder_before_all_others(write: Write) -> None:
    write("first/loaded_own.py", ATTENDS.replace("own", "first"))
    path = write("second/loaded_own.py", ATTENDS)
    sys.path.insert(0, str(path.parent.parent / "first"))
    for _ in range(2):
        found = load_candidate(str(path))
        assert found.name == "loaded_own" and found.paged_attention() == "own"
    assert sys.path.count(str(path.parent)) == 1


def test_a_module_has_its_support_and_its_backends(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    repairs: list[int] = []
    monkeypatch.setattr(module, "repair_loaded_interpreter", lambda: repairs.append(1))
    monkeypatch.setattr(module, "find_backends", lambda top: {"own": 1})
    text = (
        "from pagetwin.conformance import Support\nSUPPORT = Support(head_sizes=[8])\n"
    )
    found = load_candidate(str(write("loaded_limits.py", text + ATTENDS)))
    assert found.support == Support(head_sizes=[8]) and found.BACKENDS == {"own": 1}
    assert repairs == [1]
    monkeypatch.setattr(module, "find_backends", lambda top: {})
    with pytest.raises(ValueError, match="has none of the operations"):
        load_candidate(str(write("loaded_nothing.py", "x = 1\n")))


def test_candidates_are_guarded_and_twins_are_not(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[int] = []
    guard = SimpleNamespace(
        start=lambda: starts.append(1), guards=lambda name: "reference" not in name
    )
    monkeypatch.setattr(module, "GUARD", guard)
    monkeypatch.setattr(
        module, "guard_operations", lambda given: dict.fromkeys(given, max)
    )
    assert not load_candidate("reference").is_guarded and not starts
    found = load_candidate(str(write("loaded_guarded.py", ATTENDS)))
    assert found.is_guarded and found.operations["paged_attention"] is max
    assert starts == [1]


def test_a_twin_is_that_of_the_package(write: Write) -> None:
    sys.path.insert(0, str(write("reference.py", ATTENDS).parent))
    assert load_candidate("reference").name == "pagetwin.reference"


def test_a_solution_is_loaded_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    top = SimpleNamespace()
    monkeypatch.setattr(adapter, "load_solution", lambda name: top)
    assert module._import("own.json") == ("own.json", top)


def test_a_missing_module_is_named(write: Write) -> None:
    with pytest.raises(ModuleNotFoundError, match="module loaded_no was not") as raised:
        load_candidate("loaded_no.part")
    assert raised.value.name == "loaded_no"
    for name, text in (
        ("loaded_one_more.py", "import loaded_one\n"),
        ("loaded_raises.py", "raise ModuleNotFoundError('without a name')\n"),
    ):
        with pytest.raises(ModuleNotFoundError) as raised:
            load_candidate(str(write(name, text)))
        assert "implementation =" not in str(raised.value)


# arguments


def test_arguments_that_may_be_left_out_have_a_default() -> None:
    found = arguments_with_default()
    assert {"scale", "out", "lse"} <= found and not {"query", "key_cache"} & found
    assert not module._takes(max, "key")  # it has no signature


def test_only_what_a_function_lacks_is_left_out() -> None:
    kernel, narrow = Kernel(), Support(options=[])
    beyond = candidate(kernel.few, narrow).outside()
    assert beyond.paged_attention(**CALL, scale=2.0) == "result"
    assert kernel.calls == [{"scale": 2.0}]
    any_keyword = Candidate("own", {"paged_attention": lambda **given: given}, narrow)
    assert any_keyword.paged_attention(**CALL, lse=None).keys() == {*CALL, "lse"}
    converts = Support(tensor_dtypes={"sinks": ["bfloat16"], "lse": ["bfloat16"]})
    candidate(kernel.named, converts).paged_attention(**CALL)
    assert kernel.calls[-1].keys() == CALL.keys()
    with pytest.raises(OutsideSupport, match="sinks in float32"):
        sinks = AttentionOptions(sinks=torch.full((4,), 0.1))
        candidate(kernel.whole, converts).paged_attention(**CALL, options=sinks)


def test_the_flag_is_plain_where_it_is_that_of_the_operation() -> None:
    nothing, rows = Support(options=[]), torch.zeros(3, 4, 8)
    for operation, plain in (("paged_attention", True), ("encoder_attention", False)):
        for flag in (True, False, None):
            given: dict[str, Any] = {"query": rows, "key": rows, "value": rows}
            given["options"] = AttentionOptions(causal=flag)
            found = why_outside(operation, given, nothing)
            assert found == (None if flag in (plain, None) else "option causal")


def test_new_tokens_are_read_from_their_starts() -> None:
    given = CALL | {"max_query_len": 2}
    found = why_outside("paged_attention", given, Support(query_lens=[2]))
    assert found == "3 new tokens of a request"
