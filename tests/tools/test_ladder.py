"""Is every rung of the ladder right, does it compile, and do the pages say what was timed?"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.ladder import portable, run
from benchmarks.ladder.portable import RUNGS
from pagetwin.examples.ladder import rungs as ladder
from pagetwin.examples.ladder import shipped
from pagetwin.examples.ladder.batches import (
    LadderBatch,
    num_processors,
    random_batch,
    truth,
)
from pagetwin.examples.ladder.rungs import Rung
from pagetwin.optimized.dispatch import dispatch, families
from pagetwin.optimized.runtime.family import KernelFamily, Role
from pagetwin.optimized.runtime.plan_cache import PlanCache
from support.compiler_process import json_lines

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "shared" / "examples" / "ladder"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = (8, 2, 32)
LENS = {
    # one key, both sides of a block and of a tile, and a row that several spans share
    "decode": ((1,) * 5, (130, 1, 16, 128, 300)),
    # a prompt, one after a context, a decode; tiles of 128 tokens that are not full
    "prefill": ((131, 20, 1), (131, 90, 65)),
}
# a program for each token and head: slow in the interpreter
FEW = ((17, 2, 1), (17, 70, 65))
COMPILED = [rung for rung in ladder.RUNGS if rung.file != "shipped"]


def as_interpreted(rung: Rung) -> str:
    """Return what the interpreter runs of a rung: it has neither warps nor stages."""
    kept = {
        k: v for k, v in rung.settings.items() if k not in ("num_warps", "num_stages")
    }
    # without a kernel for one chip only, what other chips get is what ships
    file = rung.file.replace(portable.__name__, "shipped")
    return f"{rung.kind} {file} {kept}"


DIFFERENT = list({as_interpreted(rung): rung for rung in reversed(RUNGS)}.values())[
    ::-1
]


def batch_of(rung: Rung) -> LadderBatch:
    lens = FEW if rung.file == "prefill_1_tokens" else LENS[rung.kind]
    return random_batch(*lens, HEADS, torch.float16, DEVICE, seed=3)


@pytest.mark.parametrize(
    "rung", DIFFERENT if DEVICE == "cpu" else RUNGS, ids=lambda rung: rung.name
)
def test_every_token_of_a_rung_keeps_its_budget(rung: Rung) -> None:
    batch = batch_of(rung)
    out = torch.full_like(batch.query, float("nan"))
    rung.prepare(batch, out)()
    verdict = truth(batch).judge(out)
    assert verdict.ok, verdict


@pytest.mark.parametrize(
    ("file", "reqs"),
    [("decode_6_balanced", 1), ("decode_7_edges", 3), ("decode_flattened", 3)],
)
def test_a_second_launch_finds_the_counters_at_zero(file: str, reqs: int) -> None:
    """Other lengths of the same requests too: a graph is replayed with them."""
    module = import_module(f"pagetwin.examples.ladder.{file}")
    lens = (130, 45, 33)[:reqs]
    batch = random_batch((1,) * reqs, lens, HEADS, torch.float16, DEVICE)
    out = torch.full_like(batch.query, float("nan"))
    launch = module.prepare(batch, out, keys=32)
    launch()
    first = out.clone()
    launch()
    assert torch.equal(first, out)
    assert truth(batch).judge(out).ok
    batch.seq_lens[0] = 40
    shorter = LadderBatch(**{**vars(batch), "kv_lens": (40, *batch.kv_lens[1:])})
    launch()
    assert truth(shorter).judge(out).ok


def test_rows_are_shared_by_spans_in_the_batches_above() -> None:
    """Otherwise no part would be written, and nothing joined."""
    spans = 2 * num_processors(torch.device("cpu")) // HEADS[1]
    tiles = [-(-kv // 128) for kv in LENS["decode"][1]]
    ends = [sum(tiles[: req + 1]) for req in range(len(tiles))]
    cuts = {span * ends[-1] // spans for span in range(1, spans)}
    assert 1 < spans < ends[-1]
    assert cuts - set(ends)


def test_the_judge_rejects_a_dropped_key_and_a_token_left_out() -> None:
    batch = random_batch(*LENS["decode"], HEADS, torch.float16, "cpu", seed=3)
    right = truth(batch)
    assert right.judge(right.exact.half().view(batch.query.shape)).ok
    shorter = LadderBatch(
        **{**vars(batch), "kv_lens": tuple(max(1, n - 1) for n in batch.kv_lens)}
    )
    assert not right.judge(truth(shorter).exact.half().view(batch.query.shape)).ok
    few = truth(batch, 2)
    out = right.exact.half().view(batch.query.shape)
    out[2] = float("nan")
    assert not few.judge(out).ok


def test_a_ladder_counts_from_one_and_what_was_tried_is_shown_with_a_rung() -> None:
    for kind in ("decode", "prefill"):
        numbers = [
            rung.number for rung in RUNGS if rung.kind == kind and not rung.tried
        ]
        assert numbers == list(range(1, len(numbers) + 1))
        assert {rung.number for rung in RUNGS if rung.kind == kind} <= set(numbers)
    names = [rung.name for rung in RUNGS]
    assert len(set(names)) == len(names)
    shown = json.loads((ROOT / "docs/data/ladder.json").read_text(encoding="utf-8"))
    assert {rung["name"] for rung in shown["rungs"]} <= set(names)
    files = {path.stem for path in FOLDER.glob("*.py")}
    files -= {"__init__", "batches", "rungs"}
    assert {rung.file for rung in ladder.RUNGS} == files


def test_workloads_count_the_bytes_and_operations_by_hand() -> None:
    lens = {name: lens for name, (_, lens) in run.workloads().items()}
    assert len(lens["decode-256-ragged"][1]) == 256
    assert 16 <= min(lens["decode-256-ragged"][1]) <= 16_384
    batch = random_batch((2,), (5,), (4, 2, 16), torch.float16, "cpu")
    # 5 keys and values of 2 heads, 2 queries and outputs of 4 heads, 16 elements of 2 bytes
    assert batch.bytes == 2 * 5 * 2 * 32 + 2 * 2 * 4 * 32
    # the tokens see 4 and 5 keys
    assert batch.flops == 4 * (4 + 5) * 4 * 16


def test_a_run_is_recorded_and_its_pages_show_every_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "hooks")
    pages = import_module("ladder_table")
    record = run.new_record(DEVICE, "abc1234")
    few = ("decode_3_tensor_cores", "decode_4_splits", "prefill_4_diagonal")
    slow = {
        place: "left out" for place, rung in enumerate(RUNGS) if rung.file not in few
    }
    place = tmp_path / "ladder.json"
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    run.measure(record, DEVICE, dtype, True, float("inf"), slow, lambda: None)
    place.write_text(json.dumps(record), encoding="utf-8")
    names = [rung["name"] for rung in record["rungs"]]
    for kind in ("decode", "prefill"):
        tables = pages.ladder_table(kind, place), pages.ladder_tried(kind, place)
        for rung in record["rungs"]:
            if rung["kind"] == kind:
                assert (
                    f"| {rung['number']} | {rung['title']} |" in tables[rung["tried"]]
                )
        assert "failed" in tables[0] and "µs" in tables[0] and "&times; " in tables[1]
    failed = {row["rung"] for row in record["results"] if "failed" in row}
    assert failed == {RUNGS[number].name for number in slow} & set(names)
    assert "abc1234" in pages.ladder_run(place)
    missing = tmp_path / "none.json"
    for shown in (pages.ladder_run(missing), pages.ladder_table("decode", missing)):
        assert shown == pages.NO_RUN
    # what the limit cuts off is named
    run.measure(record, DEVICE, dtype, True, 0.0, {}, lambda: None)
    assert record["left_out"] == list(run.workloads(smoke=True))
    assert record["left_out"][0] in pages.ladder_run(_written(place, record))


def _written(place: Path, record: run.Record) -> Path:
    place.write_text(json.dumps(record), encoding="utf-8")
    return place


def test_a_wrong_rung_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "prepare", lambda batch, out: lambda: out.fill_(1.0))
    batch = random_batch((1,), (20,), HEADS, torch.float16, DEVICE)
    rung = next(rung for rung in RUNGS if rung.file == "shipped")
    with pytest.raises(ArithmeticError, match=r"first launch: row .: error"):
        run.ready(rung, batch, truth(batch), DEVICE == "cuda", [])


@pytest.mark.parametrize("way", [shipped, portable])
def test_the_portable_rung_leaves_out_the_kernels_of_one_chip(
    way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family that notes which calls are dispatched to it stands for the chip."""
    asked: list[object] = []
    # None: it does not support the call
    family = KernelFamily("some", Role.PREFILL, asked.append, None)  # type: ignore[arg-type]
    known = (family, *families.FAMILIES)
    monkeypatch.setattr(families, "FAMILIES", known)
    monkeypatch.setattr(dispatch.PIPELINE, "plans", PlanCache(8))
    batch = random_batch((2, 1), (20, 9), HEADS, torch.float16, DEVICE)
    out = torch.full_like(batch.query, float("nan"))
    way.prepare(batch, out)()
    assert truth(batch).judge(out).ok
    assert len(asked) == (0 if way is portable else 1)
    assert families.FAMILIES is known


@pytest.mark.skipif(DEVICE == "cuda", reason="it would run")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "with --smoke the rungs are tried"),
        (("--smoke",), "--json: expected the path"),
    ],
)
def test_without_a_gpu_a_run_says_what_it_needs(
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    with pytest.raises(SystemExit):
        run.main()
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_every_rung_compiles_for_hopper_and_stages_hold_what_they_are_said_to() -> None:
    lines = json_lines(ROOT / "tests/benchmarks/ladder/compile_rungs.py", "90")
    assert {line["rung"] for line in lines} == {rung.name for rung in COMPILED}
    for line in lines:
        assert line["shared"] <= 232_448, line
        assert line["stack"] <= 512, line
    shared = {
        line["rung"]: line["shared"] for line in lines if "parts" in line["kernel"]
    }
    one, three, four, five = (
        shared[rung.name] for rung in RUNGS if rung.name in shared
    )
    # 128 keys and values of 128 elements, and their blocks' ids
    tile = 2 * 128 * 128 * 2
    assert one < three == four
    assert tile <= five - three <= tile + 128 * 8
