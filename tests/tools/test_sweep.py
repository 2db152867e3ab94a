"""`tests/gpu/sweep.py` on tiny batches in the interpreter: what it draws, forces and reports."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from pagetwin.optimized.dispatch import dispatch
from pagetwin.optimized.kernels.portable.host import launches
from pagetwin.tools.bench.inputs import draw_inputs

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
import sweep


@pytest.mark.parametrize("kind", ["decode", "verify"])
def test_drawn_batches_fit_the_memory_and_their_kind(kind: str) -> None:
    drawn = [sweep.draw_workload(kind, "", random.Random(seed)) for seed in range(200)]
    assert len({workload.about for workload in drawn}) > 190
    assert {workload.is_ragged for workload in drawn} == {True, False}
    for workload in drawn:
        assert workload.bytes <= 1.1 * sweep.LARGEST_CACHE
        assert all(
            new <= keys
            for new, keys in zip(workload.query_lens, workload.kv_lens, strict=True)
        )
        rows = workload.query_lens[0] * workload.query_heads // workload.kv_heads
        assert rows > 16 if kind == "verify" else set(workload.query_lens) == {1}


def run(
    file: Path, kind: str, shapes: int, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """Run the program on tiny batches, and return the lines of its file."""
    words = [str(file), "--kind", kind, "--shapes", str(shapes), "--smoke"]
    words += ["--repeats", "1", "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", ["sweep.py", *words])
    assert sweep.main() == 0
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.extended
@pytest.mark.parametrize("kind", sweep.KINDS)
def test_every_alternative_computes_the_same(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sweep.jsonl"
    run(file, kind, 1, monkeypatch)
    lines = run(file, kind, 2, monkeypatch)
    machine, *batches = lines
    assert machine["commit"] == "abc" and machine["smoke"]
    names = {
        "ours",
        *(alternative.name for alternative in sweep.alternatives(kind, "cpu")),
    }
    assert [batch["name"] for batch in batches] == [f"{kind}-0-0", f"{kind}-0-1"]
    for batch in batches:
        assert set(batch["us"]) == names and not batch["failed"]
        assert batch["regret"] >= 1


def test_a_forced_alternative_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    splits: list[int] = []
    known = launches.Launches.short_splits

    def watch(self: Any, *bounds: int) -> Any:
        found = known(self, *bounds)
        splits.append(found.splits)
        return found

    monkeypatch.setattr(launches.Launches, "short_splits", watch)
    workload = sweep.draw_workload("decode", "", random.Random(3)).tiny()
    inputs = draw_inputs(workload, 0, "cpu")
    seen = {}
    for alternative in sweep.alternatives("decode", "cpu"):
        splits.clear()
        alternative.prepare(inputs).call()
        seen[alternative.title] = set(splits)
        assert not len(dispatch.PIPELINE.plans.repeats)
    assert seen.pop("stream-k") == {0}
    assert len(seen) == len(sweep.PROGRAMS) and all(
        min(seen_splits) for seen_splits in seen.values()
    )


def test_splits_of_few_decodes_follow_from_the_programs() -> None:
    """8 requests and kv heads, 30 KV tiles, 132 multiprocessors: 16 programs have 2 tiles each."""
    chip = (128, 132, 132)
    tried = [sweep.split_among(share)(2, 4, 30, *chip) for share in (0.5, 1, 2)]
    assert tried == [8, 15, 30]
    assert sweep.split_among(0)(2, 4, 30, *chip) == 0
    assert sweep.split_among(0.5)(25, 4, 30, *chip) == 1


def test_the_summary_names_the_worst_batch() -> None:
    lines = [
        {"name": "a", "regret": 1.0, "ratio_to_fa3": 0.9, "failed": {}},
        {"name": "b", "regret": 1.21, "ratio_to_fa3": 0.4, "failed": {"fa3": "no"}},
    ]
    words = sweep.summarize(lines)
    assert "regret: mean 1.100, worst 1.210 (b)" in words
    assert "ratio_to_fa3: mean 0.600, worst 0.900 (a)" in words
    assert "failures in ['b']" in words
