"""Several GPUs: what each worker process of a check or a fuzzing run can use. No GPU is needed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.conformance.api import check as runner
from pagetwin.conformance.api import fuzz
from pagetwin.conformance.base.results import Result, Status
from pagetwin.conformance.running.gpus import gpus_of_workers
from pagetwin.conformance.running.worker import Job, Worker
from pagetwin.tools.command_line import INTERPRETER, choose_interpreter

pytestmark = pytest.mark.long

VISIBLE = "CUDA_VISIBLE_DEVICES"
RECORDS = """
import json
import os
from pathlib import Path

import torch

seen = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET")}
seen["is_initialized"] = torch.cuda.is_initialized()
Path(f"process-{os.getpid()}.json").write_text(json.dumps(seen))
raise ImportError("this module only records")
"""
"""An implementation that writes what its process can use, and then cannot be imported."""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets how many GPUs torch finds, and CUDA_VISIBLE_DEVICES."""

    def pretend(count: int, visible: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.delenv(VISIBLE, raising=False)
        if visible is not None:
            monkeypatch.setenv(VISIBLE, visible)

    return pretend


@pytest.mark.parametrize(
    ("count", "visible", "device", "workers", "right"),
    [
        (2, None, "cuda", 4, ["0", "1", "0", "1"]),
        (3, None, "cuda", 2, ["0", "1"]),
        (2, "5, 3", "cuda", 3, ["5", "3", "5"]),
        (2, "GPU-6a,GPU-7b", "cuda", 2, ["GPU-6a", "GPU-7b"]),
        (1, "2,-1,3", "cuda", 2, ["2", "2"]),
        (1, "MIG-1f", "cuda", 2, ["MIG-1f", "MIG-1f"]),
        (0, "", "cuda", 2, [None, None]),
        (2, None, "cuda:1", 3, ["1", "1", "1"]),
        (2, "5,3", "cuda:1", 1, ["3"]),
        (2, "5,3", "cuda", 1, [None]),
        (2, "5,3", "cpu", 2, [None, None]),
    ],
)
def test_workers_take_the_visible_gpus_in_turn(
    gpus: Any, count: int, visible: str, device: str, workers: int, right: list[str]
) -> None:
    gpus(count, visible)
    assert gpus_of_workers(device, workers) == right


@pytest.mark.parametrize(
    ("device", "gpu", "right"),
    [
        ("cuda", "7", "7"),
        ("cuda", None, "5,3"),
        ("cuda:1", None, "3"),
        ("cpu", None, "5,3"),
    ],
)
def test_the_process_of_a_worker_has_its_gpu_before_it_uses_cuda(
    gpus: Any,
    write_module: Any,
    device: str,
    gpu: str | None,
    right: str,
    tmp_path: Path,
) -> None:
    gpus(2, "5,3")
    with pytest.raises(ImportError, match="this module only records"):
        Worker(write_module(RECORDS), device, gpu=gpu).start()
    (file,) = tmp_path.glob("process-*.json")
    seen = json.loads(file.read_text())
    assert seen[VISIBLE] == right and not seen["is_initialized"]
    assert os.environ[VISIBLE] == "5,3"


class FakeWorker:
    """Records its GPU, and returns at once."""

    gpus: list[str | None] = []  # noqa: RUF012
    promises: tuple[str, ...] = ()
    known: dict[str, Result] = {}  # noqa: RUF012
    deadline = 0.0
    failed_at_once = False

    def __init__(
        self, implementation: str, device: str, *seconds: float, gpu: str | None
    ) -> None:
        self.gpus.append(gpu)

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def try_law(self, job: Job, area: str) -> Result:
        """Return that the law holds."""
        return Result(job.law, area, Status.HELD, cases=job.examples, seconds=0.01)


@pytest.mark.parametrize(
    ("device", "right"), [("cuda", ["5", "3", "5"]), ("cuda:1", ["3"] * 3)]
)
def test_fuzz_and_check_distribute_their_workers_over_the_gpus(
    gpus: Any,
    device: str,
    right: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(2, "5,3")
    for module in (fuzz, runner):
        monkeypatch.setattr(module, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "gpus", [])
    fuzz.fuzz_implementation(
        "reference",
        1.0,
        tmp_path,
        only="attention is right for every batch",
        device=device,
        workers=3,
        cases=64,
    )
    assert FakeWorker.gpus == right
    FakeWorker.gpus.clear()
    runner.check_implementation("reference", only="merg", device=device, workers=3)
    assert FakeWorker.gpus == right


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_kernels_are_not_interpreted_on_a_gpu_with_a_number(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--device cuda:1` the interpreter was selected."""
    monkeypatch.delenv(INTERPRETER, raising=False)
    choose_interpreter(device)
    assert INTERPRETER not in os.environ


@pytest.mark.parametrize(
    ("cores", "count", "right"),
    [(16, 1, 14), (32, 2, 28), (64, 2, 28), (8, 4, 7), (1, 1, 1), (2, 0, 1)],
)
def test_a_campaign_has_at_most_14_processes_per_gpu(
    cores: int, count: int, right: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "gpu")
    from campaign import choose_workers

    assert choose_workers(cores, count) == right


def test_a_campaign_counts_the_gpus_of_its_device(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "gpu")
    from campaign import count_gpus

    gpus(2)
    assert [count_gpus(device) for device in ("cuda", "cuda:1", "cpu")] == [2, 1, 0]


def test_a_campaign_starts_the_service_that_shares_a_gpu_and_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "gpu")
    import campaign

    log = tmp_path / "log"
    program = tmp_path / campaign.MPS
    program.write_text(
        f'#!/bin/sh\necho "$1 $(test -d "$CUDA_MPS_PIPE_DIRECTORY" && echo folder)" >> {log}\n'
        f'[ "$1" = -d ] || cat >> {log}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(KeyError), campaign.sharing(True):
        assert log.read_text().split() == ["-d", "folder"]
        raise KeyError
    assert log.read_text().split() == ["-d", "folder", "folder", "quit"]
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    with campaign.sharing(False):
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
