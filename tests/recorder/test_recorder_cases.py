"""Stored cases of the recorder, what they say, and how they are checked again."""

import os
import warnings
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation
from pagetwin.recorder import case as cases
from pagetwin.recorder import reproduce
from pagetwin.recorder.case import (
    PACKAGES,
    describe_history,
    describe_versions,
    load_case,
    save_case,
)
from pagetwin.recorder.findings import Corruption, CorruptionFound
from pagetwin.recorder.laws.row_case import RowCase
from pagetwin.recorder.reproduce import reproduce_case
from recorder_parts import FOUND, reproduced, step, stored

# stored cases


@pytest.mark.parametrize(("request_id", "name"), [(7, "7"), ("a", "a"), (None, None)])
def test_a_stored_case_has_all_of_the_finding(
    tmp_path: Path, request_id: Any, name: str | None
) -> None:
    finding = Corruption("block table", "wrong entry", 1, request_id, {"given": [2, 4]})
    own = stored(finding, versions={"torch": "2.0"})
    path = save_case(tmp_path, own, 64)
    assert path.name == f"pagetwin-record-{os.getpid()}-step-5-block-table.pt"
    found = load_case(path)
    assert found.finding == replace(finding, request_id=name)
    assert (found.sentence, found.number) == ("step 5: wrong", 5)
    assert found.versions == {"torch": "2.0"} and found.step is not None
    assert load_case(save_case(tmp_path, stored(step=None), 64)).step is None


def test_versions_are_those_of_what_is_installed_and_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(package: str) -> str:
        if package != "torch":
            raise PackageNotFoundError
        return "9.9"

    monkeypatch.setattr(cases, "version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = describe_versions()
    assert found.keys() == {"python", "machine", "torch"} and "torch" in PACKAGES
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    assert describe_versions() == found | {"device": "a card"}


def test_other_files_of_the_folder_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "MEBI", 1)
    (tmp_path / "notes.pt").write_bytes(b"x" * 100_000)
    assert load_case(save_case(tmp_path, stored(), 20_000)).number == 5


def test_the_stored_steps_have_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that does not fit is left out, and with it all before it."""
    monkeypatch.setattr(cases, "MEBI", 1)
    large = step(3, slot_mapping=[11, 12, 13, 32] + [-1] * 4_000)
    alone = cases._size(
        torch.load(save_case(tmp_path, stored(), 10**6), weights_only=True)
    )
    place = tmp_path / "other"
    place.mkdir()
    own = stored(ring=(step(2), large, step(4)))
    kept = load_case(save_case(place, own, alone + 10_000))
    assert [ring_step.number for ring_step in kept.ring] == [4]


def test_a_case_is_loaded_on_the_host_without_running_code_or_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, load, given = save_case(tmp_path, stored(), 64), torch.load, {}

    def warn(*args: Any, **named: Any) -> Any:
        warnings.warn("of torch", stacklevel=1)
        given.update(named)
        return load(*args, **named)

    monkeypatch.setattr(torch, "load", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_case(path)
    assert given == {"map_location": "cpu", "weights_only": True}


def test_a_file_that_cannot_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **named: Any) -> Any:
        raise PermissionError("denied")

    path = save_case(tmp_path, stored(), 64)
    torch.save({"format": cases.FORMAT}, tmp_path / "part.pt")
    with pytest.raises(ValueError, match="or it is damaged"):
        load_case(tmp_path / "part.pt")
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(PermissionError, match="denied"):
        load_case(path)


def test_the_history_has_the_lengths_and_blocks_of_each_step() -> None:
    long = step(4, seq_lens=[40, 5], block_table=[[2, *range(11, 20)], [7] * 10])
    lines = describe_history(stored(ring=(step(3), long)))
    assert lines == [
        "step 3, row 0: 3 new of 6 tokens, blocks 2 3",
        "step 4, row 0: 3 new of 40 tokens, blocks 2 11 12 13 ... 17 18 19",
        "step 5, row 0: 3 new of 6 tokens, blocks 2 3",
    ]
    assert cases._shorten(range(8)) == "0 1 2 3 4 5 6 7"
    assert describe_history(stored(step=None, ring=(step(4),))) == []
    assert describe_history(stored(Corruption("law", "wrong"), ring=(step(4),))) == []


def test_the_size_of_a_value_is_about_that_in_a_file() -> None:
    numbers = torch.zeros(1_000, dtype=torch.int64)
    for value in (numbers, {"a": numbers}, [numbers], (numbers,), {"a": [numbers]}):
        assert 8_000 <= cases._size(value) < 9_000
    assert cases._size("x" * 500) >= 500


def test_a_finding_names_its_request() -> None:
    assert FOUND.request == "the request in row 0"
    assert replace(FOUND, row=None).request == ""
    assert replace(FOUND, request_id=0).request == "request 0"
    error = CorruptionFound("wrong", FOUND, Path("case.pt"))
    assert (str(error), error.finding, error.path) == ("wrong", FOUND, Path("case.pt"))


# reproduction


def test_the_row_of_a_wrong_block_table_is_its_own(tmp_path: Path) -> None:
    for row, given, is_wrong in ((1, [7, 8], False), (1, [2, 3], True)):
        finding = Corruption(
            "law", "wrong", row, None, {"kind": "block table", "given": given}
        )
        path = save_case(tmp_path, stored(finding), 64)
        assert (reproduce_case(path, "cpu").still is not None) == is_wrong
    # the scheduler gave fewer blocks than the row has
    assert reproduced(tmp_path, "law", {"kind": "block table", "given": [2]})


def test_a_case_without_a_step_is_as_it_was_stored(tmp_path: Path) -> None:
    assert reproduced(tmp_path, "law", {}, step=None)
    assert reproduced(tmp_path, "law", {"kind": "block table", "given": []}, step=None)
    right: dict[str, Any] = {"kind": "groups"}
    assert reproduced(tmp_path, "groups", right)


def test_a_write_is_compared_byte_by_byte_with_the_part_of_the_values(
    tmp_path: Path,
) -> None:
    key, value = torch.zeros(2, 1, 4), torch.ones(2, 1, 6)
    found = {"key": key.clone(), "value": value[..., :4]}
    evidence = {
        "kind": "write",
        "given": {"key": key, "value": value},
        "found": found,
        "scales": {},
    }
    assert not reproduced(tmp_path, "cache write", evidence)
    found["key"] = -key
    assert reproduced(tmp_path, "cache write", evidence)


def test_blocks_of_other_strides_are_compared(tmp_path: Path) -> None:
    before = torch.zeros(4, 3, 2).transpose(1, 2)
    now = before.clone()
    for change, is_wrong in ((0.0, False), (1.0, True)):
        now[1, 1, 2] = change
        evidence = {"kind": "watched", "before": before, "now": now}
        assert reproduced(tmp_path, "unchanged blocks", evidence) == is_wrong


def row_case(implementation: str, output: float) -> dict[str, Any]:
    """Return a stored row whose values are all 1, so that its right output is 1."""
    blocks = torch.ones(1, 4, 1, 16)
    return RowCase(
        *("a", blocks[:, 0], torch.full((1, 1, 16), output), blocks, blocks.clone()),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
        *(None, AttentionOptions(), implementation),
    ).as_dict()


@pytest.mark.parametrize(
    ("name", "is_run"),
    [("optimized", True), ("TRITON", True), ("CUSTOM", True), ("OTHER", False)],
)
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_attention_is_run_again_on_the_kernels_that_computed_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    is_run: bool,
    factor: float,
) -> None:
    reference = load_implementation("reference")

    def attend(**given: Any) -> torch.Tensor:
        return reference.paged_attention(**given) * factor

    loaded = {
        "reference": reference,
        "optimized": SimpleNamespace(paged_attention=attend),
    }
    monkeypatch.setattr(reproduce, "load_implementation", loaded.__getitem__)
    for output in (1.0, 2.0):
        evidence = {"kind": "attention", "rows": row_case(name, output)}
        finding = Corruption("attention", "wrong", 0, None, evidence)
        path = save_case(tmp_path, stored(finding), 64)
        found = reproduce_case(path, "cpu")
        assert (found.still is None) == (output == 1.0)
        assert found.candidate_agrees == ((factor == 1.0) if is_run else None)
        assert found.candidate.startswith("optimized on cpu now: ") == is_run


@pytest.mark.parametrize(
    ("given", "has_gpu", "device"),
    [(None, True, "cuda"), (None, False, "cpu"), ("cpu", True, "cpu")],
)
def test_attention_is_computed_on_the_given_device_or_on_the_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str | None,
    has_gpu: bool,
    device: str,
) -> None:
    evidence = {"kind": "attention", "rows": row_case("own", 1.0)}
    path = save_case(tmp_path, stored(Corruption("law", "x", 0, "a", evidence)), 64)
    monkeypatch.setattr(reproduce, "_attention", lambda case, device: device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    found: Any = reproduce_case(path, given)
    assert found == device
