"""A campaign of fuzzing on a GPU, with its corpus summary as a record.

    python tests/gpu/campaign.py OUTDIR --cases 1000000 --minutes 8 --commit $(git rev-parse HEAD)

Runs `pagetwin fuzz` on the batches of signatures, with several processes per GPU. They are
distributed over all visible GPUs; `--device cuda:1` uses one of them. By default there are 7
processes per 8 cores, at most 14 per GPU: 14 on 16 cores with one GPU, 28 on 32 cores with two.

A second run with the same OUTDIR continues the first one: no case is tried twice. With `--archive
FILE.tar.gz` it continues on another machine: the corpus is unpacked from that file, if it exists,
and packed into it at the end. The record holds the counts of all runs. It is written to OUTDIR as
<date>-<device>-campaign.json and .md.

With `--mps` the processes of a GPU share it by CUDA's Multi-Process Service, so that their kernels
run at the same time: on an H200 260 batches per second and process instead of 155. The service is
started for the run and ended after it. No setting of the GPU changes.

Exit codes: 0, as many cases as requested and no failure. 1, a failure. 2, cases are left: run it
again.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from record import ROOT, describe_machine, run_limited

IMPLEMENTATION = "pagetwin.optimized"
LAWS = "for every batch of a signature"
STARTING = 60.0
"""Seconds that a run may take beyond its time limit: imports, cases of the corpus, reports."""
PER_GPU = 14
"""Processes per GPU, by default."""
MPS = "nvidia-cuda-mps-control"


def choose_workers(cores: int, gpus: int) -> int:
    """Return the number of processes: 7 per 8 cores, at most PER_GPU per GPU, at least 1.

    Args:
        cores: CPU cores of this process.
        gpus: GPUs that the processes are distributed over; 0 for tensors on the CPU.
    """
    most = 7 * cores // 8
    return max(1, min(most, PER_GPU * gpus) if gpus else most)


def count_gpus(device: str) -> int:
    """Return how many GPUs the processes are distributed over."""
    if device == "cpu":
        return 0
    import torch

    return 1 if ":" in device else torch.cuda.device_count()


def read_summary(corpus: Path) -> dict[str, Any]:
    """Return the summary of the corpus, empty before the first run."""
    (file,) = [*corpus.glob("*/summary.json")] or [None]
    if file is None:
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


@contextmanager
def sharing(is_on: bool) -> Iterator[None]:
    """Let the processes that are started meanwhile share a GPU by the Multi-Process Service.

    Args:
        is_on: whether to. If not, nothing is started.
    """
    if not is_on:
        yield
        return
    with TemporaryDirectory() as folder:
        for name in ("PIPE", "LOG"):
            os.environ[f"CUDA_MPS_{name}_DIRECTORY"] = folder
        subprocess.run([MPS, "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run([MPS], input="quit\n", text=True, check=False)
            for name in ("PIPE", "LOG"):
                del os.environ[f"CUDA_MPS_{name}_DIRECTORY"]


def main() -> int:
    """Run the campaign, and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where corpus and record are written")
    parser.add_argument("--cases", type=int, default=1_000_000, help="in all runs")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this run")
    parser.add_argument("--workers", type=int, help="default: by cores and GPUs")
    parser.add_argument("--batches", type=int, default=2048, help="per signature")
    parser.add_argument(
        "--only", default=LAWS, help="laws; the default: all signatures"
    )
    parser.add_argument("--archive", type=Path, help="the corpus as a .tar.gz file")
    parser.add_argument(
        "--mps", action="store_true", help="CUDA's Multi-Process Service"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="default: what git says")
    asked = parser.parse_args()
    if asked.mps and shutil.which(MPS) is None:
        parser.error(f"--mps: expected {MPS} on the PATH")
    gpus = count_gpus(asked.device)
    if asked.workers is None:
        asked.workers = choose_workers(len(os.sched_getaffinity(0)), gpus)
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if asked.archive is not None and asked.archive.exists():
        with tarfile.open(asked.archive) as archive:
            archive.extractall(folder, filter="data")
    before = read_summary(folder / "corpus").get("cases", 0)
    machine = describe_machine(asked.commit, asked.device)
    code, said = 0, ""
    if before < asked.cases:
        command = [sys.executable, "-c", "from pagetwin.tools.cli import app; app()"]
        command += [
            "fuzz",
            IMPLEMENTATION,
            "--only",
            asked.only,
            "--device",
            asked.device,
        ]
        command += [
            "--corpus",
            str(folder / "corpus"),
            "--html",
            str(folder / "r.html"),
        ]
        for name in ("minutes", "workers", "batches"):
            command += [f"--{name}", str(getattr(asked, name))]
        command += ["--cases", str(asked.cases - before)]
        limit = 60 * asked.minutes + STARTING
        with sharing(asked.mps):
            found, said = run_limited(command, limit, folder / "log.txt")
        code = 1 if found is None else found
    summary = read_summary(folder / "corpus")
    if asked.archive is not None and (folder / "corpus").exists():
        with tarfile.open(asked.archive, "w:gz") as archive:
            archive.add(folder / "corpus", "corpus")
    settings = {
        name: option for name, option in vars(asked).items() if name != "archive"
    }
    record = machine | {
        "gpus": gpus,
        "command": settings | {"folder": ""},
        "summary": summary,
    }
    device = re.sub(r"[^a-z0-9]+", "-", record["device"].lower()).strip("-")
    path = folder / f"{record['date'][:10]}-{device}-campaign.json"
    text = json.dumps(record, indent=1).replace(f"{ROOT}/", "")
    path.write_text(text + "\n", encoding="utf-8")
    for table in (folder / "corpus").glob("*/summary.md"):
        commit = str(record["commit"])[:12]
        words = f"# {record['device']}, {record['date'][:10]}\n\nCommit {commit}.\n\n"
        words += f"#{table.read_text(encoding='utf-8')}"
        path.with_suffix(".md").write_text(words, encoding="utf-8")
    print(said[-2000:])
    print(f"record: {path}; {summary.get('cases', 0):,} of {asked.cases:,} cases")
    if code:
        return 1
    return 0 if summary.get("cases", 0) >= asked.cases else 2


if __name__ == "__main__":
    sys.exit(main())
