"""Tuning files: which are read, which are rejected with one sentence, and what a load changes."""

import json
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.optimized import load_tuning, tuning_in_use
from pagetwin.optimized.dispatch import dispatch
from pagetwin.optimized.kernels.portable.host.tuning import Tiles
from pagetwin.optimized.kernels.portable.tables import active_tables, tuning_file
from pagetwin.optimized.kernels.portable.tables.active_tables import find_tables
from pagetwin.optimized.kernels.portable.tables.kernel_tables import DEFAULT, TileKey
from pagetwin.optimized.kernels.portable.tables.tuned_rows import TunedRow
from pagetwin.optimized.kernels.portable.tables.tuning_file import describe_measured
from pagetwin.optimized.runtime.chip import Chip

CPU = torch.device("cpu")
KEY = TileKey("decode", 16, 128, 128, 2, "auto", True, ())
ROW = TunedRow(
    KEY, Tiles(16, 128, 4, 3), Tiles(16, 64, 4, 5, 2), {"64 x 4096": 250.0}, {"64 x 4096": 200.0}
)  # fmt: skip
THRESHOLD = TunedRow("short_tiles", 20, 40, {"2 x 8192": 25.0}, {"2 x 8192": 23.0})
RATES = TunedRow("rates", DEFAULT.rates, DEFAULT.rates, {"1 x 8": 9.0}, {"1 x 8": 9.0})


@pytest.fixture(autouse=True)
def without_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no tables be chosen yet, and none afterwards."""
    monkeypatch.delenv("PAGETWIN_TUNING", raising=False)
    monkeypatch.setattr(active_tables, "_ACTIVE", {})
    yield


def make_record(device: torch.device = CPU, **changes: Any) -> dict[str, Any]:
    rows = [row.to_record() for row in (ROW, THRESHOLD, RATES)]
    return {"layout": 1, **describe_measured(device), "rows": rows} | changes


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    """Return a function that writes a file of a record or a text."""

    def write(content: Any) -> Path:
        path = tmp_path / "tuned.json"
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_file_is_loaded_and_unloaded(write: Callable[[Any], Path]) -> None:
    assert str(tuning_in_use(CPU)) == "default"
    path = write(make_record())
    plans = dispatch.PIPELINE.plans
    used = load_tuning(path, CPU)
    assert used == tuning_in_use(CPU) and used.path == path
    assert re.fullmatch(r"[0-9a-f]{12} \(tuned\.json\)", str(used))
    tables = find_tables(CPU)
    assert tables.find(KEY, Tiles(16, 16, 4, 1)) == ROW.choice
    assert tables.thresholds.short_tiles == 40 and tables.rates == DEFAULT.rates
    assert find_tables(CPU, is_invariant=True) is DEFAULT
    assert dispatch.PIPELINE.plans is not plans
    assert load_tuning(None, CPU).fingerprint == "default"
    assert find_tables(CPU) is DEFAULT


def test_a_row_whose_choice_is_the_default_changes_nothing(
    write: Callable[[Any], Path],
) -> None:
    record = make_record(rows=[RATES.to_record()])
    assert load_tuning(write(record), CPU).fingerprint == "default"


def test_a_row_says_what_was_gained() -> None:
    record = ROW.to_record()
    assert record["ratio"] == 0.8
    assert record["name"] == "decode, 16 rows, heads of 128"
    assert RATES.to_record()["ratio"] == 1.0


def without(name: str) -> dict[str, Any]:
    record = make_record()
    del record[name]
    return record


def with_row(**changes: Any) -> dict[str, Any]:
    return make_record(rows=[ROW.to_record() | changes])


def with_choice(**changes: Any) -> dict[str, Any]:
    return with_row(choice=ROW.to_record()["choice"] | changes)


OTHER_CHIP = {"chip": {**describe_measured(CPU)["chip"], "name": "NVIDIA L4"}}
FEWER_SMS = {"chip": {**describe_measured(CPU)["chip"], "multiprocessors": 3}}
OTHER_VERSION = {"versions": {"pagetwin": "0.0.9", "triton": "3.6.0"}}
BAD = {
    "no JSON": ('{"layout": 1, "ro', "is not a tuning file: expected JSON with a layout"),
    "empty": ("", "is not a tuning file"),
    "a list": ("[1]", "is not a tuning file"),
    "deep": ("[" * 100_000, "is not a tuning file"),
    "no layout": (without("layout"), "is not a tuning file"),
    "another layout": (make_record(layout=2), "has layout 2: expected 1"),
    "another chip": (
        make_record(**OTHER_CHIP),
        "is for chip.name = 'NVIDIA L4': expected \"Triton's interpreter\"",
    ),
    "a part of a chip": (make_record(**FEWER_SMS), "is for chip.multiprocessors = 3"),
    "no chip": (without("chip"), "is for chip.name = None"),
    "another version": (
        make_record(**OTHER_VERSION),
        "is for pagetwin = '0.0.9': expected '",
    ),
    "other kernels": (make_record(kernels="0" * 12), "was measured with other kernels"),
    "no rows": (without("rows"), "has no list of rows"),
    "a row that is none": (make_record(rows=[3]), "rows[0] = 3: expected the fields"),
    "a row with another field": (with_row(more=1), "rows[0] = ["),
    "twice": (make_record(rows=[ROW.to_record()] * 2), "rows[1] has the key of an earlier"),
    "an unknown threshold": (with_row(key="tiles"), "rows[0].key = 'tiles': expected one"),
    "an odd tile": (with_choice(block_n=96), "rows[0].choice.block_n = 96: expected one"),
    "a flag": (with_choice(num_warps=True), "rows[0].choice.num_warps = True: expected"),
    "many stages": (with_choice(num_stages=9), "rows[0].choice.num_stages = 9"),
    "half a threshold": (
        with_row(key="min_segment", default=512, choice=0.5),
        "rows[0].choice = 0.5: expected an integer",
    ),
    "an infinite rate": (
        with_row(key="short_rest_programs", default=1.5, choice=float("inf")),
        "rows[0].choice = inf: expected a number above 0",
    ),
    "rates": (with_row(key="rates"), "rows[0].default = ["),
    "times of other batches": (with_row(choice_us={"1": 2.0}), "the workloads of default_us"),
    "no times": (with_row(default_us=3), "rows[0].default_us = 3: expected times"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_does_not_fit_is_rejected_with_a_sentence(
    name: str, write: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    content, expected = BAD[name]
    path = write(content)
    with pytest.raises(ValueError) as caught:
        load_tuning(path, CPU)
    message = str(caught.value)
    assert expected in message and str(path) in message
    assert "\n" not in message and len(message) < 400
    # nothing is changed
    assert find_tables(CPU) is DEFAULT
    # a path in the environment is as binding as one in the program
    monkeypatch.setattr(active_tables, "_ACTIVE", {})
    monkeypatch.setenv("PAGETWIN_TUNING", str(path))
    with pytest.raises(ValueError, match=re.escape(message)):
        find_tables(CPU)


def test_a_file_that_is_too_large_or_missing_is_an_error(
    write: Callable[[Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError):
        load_tuning(tmp_path / "none.json", CPU)
    monkeypatch.setattr(tuning_file, "LARGEST_FILE", 100)
    with pytest.raises(ValueError, match="has more than 100 bytes"):
        load_tuning(write(make_record()), CPU)


def test_the_environment_names_a_file_or_switches_them_off(
    write: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(make_record())
    monkeypatch.setenv("PAGETWIN_TUNING", str(path))
    assert tuning_in_use(CPU).path == path
    monkeypatch.setattr(active_tables, "_ACTIVE", {})
    monkeypatch.setenv("PAGETWIN_TUNING", "Off")
    assert tuning_in_use(CPU).path is None


A100 = Chip("NVIDIA A100-SXM4-80GB", "8.0", 108, 166912)
GPU = torch.device("cuda", 0)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend an A100, and return the path of its file in an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(active_tables, "INTERPRETED", False)
    for module in (active_tables, tuning_file):
        monkeypatch.setattr(module, "describe_chip", lambda device: A100)
    path = tmp_path / "pagetwin/tuning/nvidia-a100-sxm4-80gb-108.json"
    path.parent.mkdir(parents=True)
    return path


def test_the_file_of_the_chip_in_the_cache_folder_is_found(cached: Path) -> None:
    assert tuning_in_use(GPU).path is None
    active_tables._ACTIVE.clear()
    cached.write_text(json.dumps(make_record(GPU)), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning_in_use(GPU).path == cached
    assert find_tables(GPU).thresholds.short_tiles == 40


def test_a_process_without_a_home_has_the_default_tables(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", fail)
    assert str(tuning_in_use(GPU)) == "default"


@pytest.mark.parametrize("name", ["another version", "no JSON", "other kernels"])
def test_a_stale_file_in_the_cache_folder_is_a_warning(name: str, cached: Path) -> None:
    content, _ = BAD[name]
    text = (
        content
        if isinstance(content, str)
        else json.dumps(content | {"chip": A100._asdict()})
    )
    cached.write_text(text, encoding="utf-8")
    with pytest.warns(UserWarning, match="pagetwin tune") as caught:
        assert find_tables(GPU) is DEFAULT
        # once per device
        assert find_tables(GPU) is DEFAULT
    assert len(caught) == 1
    message = str(caught[0].message)
    assert str(cached) in message and "PAGETWIN_TUNING=off" in message


def test_a_tile_that_does_not_fit_the_chip_is_rejected(cached: Path) -> None:
    wide = ROW.to_record()
    wide["choice"] = wide["choice"] | {"block_n": 256, "num_stages": 8}
    cached.write_text(json.dumps(make_record(GPU, rows=[wide])), encoding="utf-8")
    with pytest.raises(
        ValueError,
        match=r"take 401,408 bytes of shared memory: expected at most 166,912",
    ):
        load_tuning(cached, GPU)


def test_threads_that_plan_first_choose_the_tables_once(
    write: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reads = write(make_record()), []
    read = active_tables.read_tables

    def note(*arguments: Any) -> Any:
        reads.append(arguments)
        return read(*arguments)

    monkeypatch.setattr(active_tables, "read_tables", note)
    monkeypatch.setenv("PAGETWIN_TUNING", str(path))
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(find_tables(CPU)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 1 and len({id(tables) for tables in found}) == 1
