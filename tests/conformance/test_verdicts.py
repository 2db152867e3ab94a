"""Verdicts on other kernels: what a run records of a check, and what the documentation shows."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the script that checks the adapters."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "gpu")
    import verdicts

    return verdicts


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module that makes the tables of the documentation."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "hooks")
    import verdict_table

    return verdict_table


def line(law: str, status: str, **more: Any) -> str:
    """Return the line of a law."""
    kept = ("case", "what", "where", "found", "right", "message", "reason", "cause")
    words = dict.fromkeys(kept, "")
    return json.dumps(
        words | {"law": law, "status": status, "cases": 5, "skipped": 1} | more
    )


def test_a_stopped_check_keeps_the_laws_that_were_judged(
    script: Any, tmp_path: Path
) -> None:
    lines = [
        line("b", "held"),
        line("a", "broken", case="x" * 1000, found="nan"),
        line("c", "undeclared", reason="head size 16"),
    ]
    path = tmp_path / "one.jsonl"
    path.write_text("\n".join(lines))
    found = script.summarize(path)
    assert found["ended"] == "stopped"
    assert found["counts"] == {"broken": 1, "held": 1, "undeclared": 1}
    assert found["cases"] == 8 and found["undeclared"] == {"head size 16": 1}
    assert [law["law"] for law in found["laws"]] == ["a", "b"]
    assert found["laws"][0]["found"] == "nan" and "found" not in found["laws"][1]
    assert len(found["laws"][0]["case"]) == script.LONGEST


def test_a_law_whose_time_was_over_is_recorded_with_what_held(
    script: Any, tmp_path: Path
) -> None:
    reason = "4 cases held in 40 seconds"
    lines = [
        line("a", "not finished", reason=reason),
        line("b", "not finished", cases=0, skipped=0),
        json.dumps({"symptoms": []}),
    ]
    path = tmp_path / "one.jsonl"
    path.write_text("\n".join(lines))
    found = script.summarize(path)
    assert found["ended"] == "2 laws are not finished"
    assert found["counts"] == {"not finished": 2} and found["cases"] == 4
    assert [(law["law"], law["reason"]) for law in found["laws"]] == [("a", reason)]


@pytest.mark.extended
@pytest.mark.skipif(torch.cuda.is_available(), reason="the adapter needs a GPU")
def test_an_adapter_that_cannot_run_is_recorded_with_the_reason(
    script: Any, tmp_path: Path
) -> None:
    path = tmp_path / "vllm_cache.jsonl"
    asked = argparse.Namespace(
        only="",
        examples=1,
        device="cpu",
        limit=60.0,
        seconds_of_a_law=60.0,
        seconds_of_a_case=60.0,
        workers=1,
    )
    adapter = str(ROOT / "docs" / "adapters" / "vllm_cache.py")
    assert script.judge_here(adapter, path, asked) == 2
    found = script.summarize(path)
    assert not found["laws"] and "needs vLLM" in found["why"]


def test_every_published_failure_has_one_explanation_and_each_explanation_a_failure(
    table: Any,
) -> None:
    unused = [
        f"{explanation['adapter']}: {explanation['title']}"
        for explanation in table.explanations()
    ]
    for name, verdict in table.newest_verdicts().items():
        for law in verdict["laws"]:
            known = [e for e in table.explanations() if table.explains(e, name, law)]
            assert len(known) == (law["status"] in table.FAILED), (name, law["law"])
            for failure in known:
                assert failure["fault"] in table.FAULTS
                title = f"{name}: {failure['title']}"
                unused = [other for other in unused if other != title]
    assert not unused


def test_the_page_names_each_kernel_and_each_law_that_it_breaks(table: Any) -> None:
    rows, details = table.verdict_table(), table.verdict_details()
    for name, verdict in table.newest_verdicts().items():
        assert table.TITLES[name] in rows
        for law in verdict["laws"]:
            assert law["status"] not in table.FAILED or f"*{law['law']}*" in details


def test_every_adapter_has_a_title_and_a_library(script: Any, table: Any) -> None:
    names = {path.stem for path in (ROOT / "docs" / "adapters").glob("*.py")}
    assert names <= table.TITLES.keys() and names <= script.LIBRARIES.keys()


def run_of(folder: Path, name: str, **more: Any) -> Path:
    """Write the record of a run that judged one adapter, and return its path."""
    verdict = {"adapter": name, "library": "l", "counts": {"held": 1, "broken": 2}}
    verdict |= {"cases": 9, "ended": "all laws ended", "undeclared": {}}
    laws = [
        {"law": "a", "status": "held"},
        {"law": "b", "status": "broken", "what": "output", "case": "BatchPlan(1, 2)"},
        {"law": "c", "status": "crashed", "case": "3"},
    ]
    record = {
        "date": "2026-11-22T10:00:00+00:00",
        "commit": "c",
        "device": "d",
        "versions": {"torch": "2.11.0", "triton": "3.6.0", "xformers": None},
        "verdicts": [verdict | {"laws": laws}],
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record | more))
    return path


def test_the_page_has_the_last_kept_verdict_on_each_adapter_and_what_it_breaks(
    table: Any, tmp_path: Path
) -> None:
    from page_data import keep

    keep("verdicts", [run_of(tmp_path, "vllm_cache")], tmp_path)
    keep("verdicts", [run_of(tmp_path, "torch_sdpa")], tmp_path)
    keep("verdicts", [run_of(tmp_path, "vllm_cache", commit="later")], tmp_path)
    found = table.newest_verdicts(tmp_path)
    assert {name: verdict["commit"] for name, verdict in found.items()} == {
        "torch_sdpa": "c",
        "vllm_cache": "later",
    }
    laws = [[law["law"] for law in verdict["laws"]] for verdict in found.values()]
    assert laws == [["b", "c"]] * 2
