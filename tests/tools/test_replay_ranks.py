"""The replay on several ranks: processes that share the keys of every sequence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.optimized.runtime.launcher import INTERPRETED
from pagetwin.recorder import Recorder
from pagetwin.recorder.settings import RecorderSettings
from pagetwin.tools.replay import named_twins, ranks
from pagetwin.tools.replay.mismatch import TwinMismatch, load_step
from pagetwin.tools.replay.reproduce import reproduce
from pagetwin.tools.replay.run import Replay
from pagetwin.tools.replay.settings import ReplaySettings, choose_settings
from pagetwin.tools.replay.step import ReplayLaw

SMALL = {"requests": 2, "scale": 1 / 300, "head_size": 8, "query_heads": 2}


def on_two_ranks(*twins: str, **given: object) -> ReplaySettings:
    """Return settings of a replay that takes a few seconds."""
    some = {"kv_heads": 1, "token_budget": 24, "ranks": 2, "twins": twins}
    return choose_settings("cpu", **{**SMALL, **some, **given})


def run(settings: ReplaySettings) -> int:
    """Run a replay to its end, and return the number of its steps."""
    replay = Replay(settings)
    records = list(replay.steps())
    assert replay.requests_finished == len(replay.requests)
    for record in records:
        assert len(record.verdicts) == len(settings.names)
        assert all(verdict.ok for verdict in record.verdicts)
    return len(records)


WRONG = {
    "rank 1 drops its first key": (
        "batch = replace(batch, seq_lens=(batch.seq_lens - 1).clamp(min=0))"
        " if self.ranks.rank == 1 else batch",
        "",
        ReplayLaw.ATTENTION,
    ),
    "two ranks round one element up": (
        "",
        "out[0, 0, 0] = out[0, 0, 0].nextafter(out.new_tensor(9.0))"
        " if self.ranks.world_size > 1 else out[0, 0, 0]",
        ReplayLaw.BITS,
    ),
    "the process of rank 1 ends": (
        "self.ranks.rank != 1 or os._exit(1)",
        "",
        ReplayLaw.RUNS,
    ),
    "rank 1 does not answer": (
        "",
        "self.ranks.rank != 1 or time.sleep(99)",
        ReplayLaw.RUNS,
    ),
}


def write_wrong(folder: Path, before: str, after: str) -> str:
    """Write a package whose parallel step is changed, and return its name."""
    name = f"wrong_{folder.name}".replace("-", "_")
    (folder / f"{name}.py").write_text(
        "import os, time\n"
        "from dataclasses import replace\n"
        "from pagetwin.reference import *\n"
        "import pagetwin.reference as right\n"
        "class DecodeContextParallel(right.DecodeContextParallel):\n"
        "    def attend(self, query, key_cache, value_cache, batch):\n"
        f"        {before or 'pass'}\n"
        "        out = super().attend(query, key_cache, value_cache, batch)\n"
        f"        {after or 'pass'}\n"
        "        return out\n"
    )
    return name


needs_interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="the ranks of a replay run on the CPU"
)


@pytest.mark.extended
@pytest.mark.parametrize(
    "twin", ["reference", pytest.param("optimized", marks=needs_interpreter)]
)
def test_two_processes_compute_every_step_of_a_trace(twin: str) -> None:
    # interpreted kernels take seconds per request
    requests = 2 if twin == "reference" else 1
    settings = on_two_ranks(twin, requests=requests)
    assert settings.names == (twin, f"{twin} on 2 ranks")
    assert run(settings) > requests


@pytest.mark.extended
def test_ranks_with_copies_of_their_shares_compute_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on GPUs, whose ranks cannot map a cache of the host."""
    made = []

    class Staged(ranks.RanksTwin):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named | {"is_staged": True})
            made.append(self)

    monkeypatch.setattr(named_twins, "RanksTwin", Staged)
    assert run(on_two_ranks("reference", splits=2)) > 2
    assert [made_twin.name for made_twin in made] == [
        "reference on 1 rank with 2 splits",
        "reference on 2 ranks with 2 splits",
    ]


@pytest.mark.parametrize("gpus", [0, 1])
def test_more_ranks_than_gpus_are_rejected_in_one_sentence(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(
        ValueError, match=rf"ranks = 2 .* torch finds {gpus} GPU"
    ) as told:
        choose_settings("cuda", ranks=2)
    assert str(told.value).count(". ") == 0
    assert choose_settings("cuda", ranks=1).ranks == 1


def test_two_ranks_on_two_gpus_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_settings("cuda", ranks=2).device == "cuda"


two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="each rank has a GPU of its own"
)


@pytest.mark.cuda
@two_gpus
@pytest.mark.parametrize("splits", [0, 8])
def test_two_gpus_compute_every_step_of_a_trace(splits: int) -> None:
    settings = choose_settings("cuda", requests=2, scale=1 / 50, ranks=2, splits=splits)
    assert run(settings) > 2


@pytest.mark.extended
def test_with_fixed_splits_two_processes_give_the_bits_of_one_in_every_step() -> None:
    settings = on_two_ranks("reference", splits=4, layers=2)
    assert settings.names == (
        "reference on 1 rank with 4 splits",
        "reference on 2 ranks with 4 splits",
    )
    assert run(settings) > 3


@pytest.mark.extended
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_rank_is_caught_stored_and_caught_again(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after, law = WRONG[what]
    if "answer" in what:
        monkeypatch.setattr(ranks, "TIMEOUT_S", 1.0)
    monkeypatch.syspath_prepend(tmp_path)
    name = write_wrong(tmp_path, before, after)
    splits = 2 if law is ReplayLaw.BITS else 0
    stored_in = tmp_path / "stored"
    stored_in.mkdir()
    replay = Replay(on_two_ranks(name, splits=splits), folder=stored_in)
    with pytest.raises(TwinMismatch, match=f"{name} on 2 ranks") as caught:
        list(replay.steps())
    assert caught.value.violation.law == law.value, caught.value
    assert caught.value.path is not None
    stored, _ = load_step(caught.value.path)
    assert stored.twins == replay.settings.names
    still = reproduce(caught.value.path)
    assert still is not None
    assert still.violation.law == law.value


def test_a_backend_on_several_ranks_raises() -> None:
    with pytest.raises(ValueError, match="'triton' does not run on several ranks"):
        Replay(on_two_ranks("triton"))


def test_a_recorder_of_several_ranks_raises(tmp_path: Path) -> None:
    recorder = Recorder(RecorderSettings(tmp_path))
    with pytest.raises(ValueError, match="its own process"):
        Replay(on_two_ranks("reference"), recorder=recorder)
