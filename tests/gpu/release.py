"""Everything that a release records on a GPU, in one command that continues where it stopped.

    python tests/gpu/release.py FOLDER --minutes 9 --commit "$(git rev-parse HEAD)"
    python tests/gpu/release.py FOLDER --list
    python tests/gpu/release.py FOLDER --only tests bench

Each job has a folder of its own in FOLDER, with its log and its records. A job is started only if
its time limit ends within `--minutes`. FOLDER/jobs.jsonl has one line for each job that has ended.
The next run with the same FOLDER leaves out the jobs that ended with exit code 0.

Jobs start in the order of the list. A job that measures times has a GPU, or the whole host, for
itself. The others share GPUs.

Exit codes: 0, all jobs have ended well. 1, one failed. 2, some were not started.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from string import Template

from campaign import MPS
from record import ROOT, environment, run_limited

HERE = Path(__file__).resolve().parent
CLI = [sys.executable, "-c", "from pagetwin.tools.cli import app; app()"]
KERNEL_TESTS = (
    "fp8 partial_results launch short_decode append append_sm90 prefill_sm90 fp8_prefill_sm90"
    " fp8_decode_sm90 latent_sm90 latent latent_cuda sparse_attention invariant_sm90"
    " cascade_attention repeat_cuda warm_up conformance_fatal"
)
SANITIZED = (
    "portable short append segments cascade prefix hopper unaligned packed copied token-tiles wide"
    " invariant fp8 codes latent portable-latent"
)
SHARED, OWN, ALL = "shares a GPU", "a GPU of its own", "all GPUs"


@dataclass(frozen=True)
class Job:
    """What one job runs, and what it needs.

    Attributes:
        name: also of its folder.
        command: its words. $OUT stands for its folder, $COMMIT for the commit.
        seconds: after which it is stopped.
        place: SHARED, OWN or ALL.
        gpus: of the host, without which it cannot run.
        is_engine: whether it imports vLLM, from the folder VLLM_PATH where that is set.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    place: str = SHARED
    gpus: int = 1
    is_engine: bool = False


def script(name: str, *words: str) -> tuple[str, ...]:
    """Return the command that runs a program of this folder."""
    return (sys.executable, str(HERE / name), *words)


def bench(suite: str, record: str) -> tuple[str, ...]:
    """Return the command that times one suite."""
    words = ("bench", "--suite", suite, "--rounds", "2", "--commit", "$COMMIT")
    return (*CLI, *words, "--json", f"$OUT/{record}.json")


def sweep(kind: str) -> tuple[str, ...]:
    """Return the command that times choices between kernels on shapes drawn from the date."""
    seed = datetime.date.today().isoformat()
    words = ("--kind", kind, "--seed", seed, "--commit", "$COMMIT")
    return script("sweep.py", "$OUT/sweep.jsonl", *words)


def file_of_tests(name: str) -> str:
    """Return the path of a test file, whatever its folder.

    Raises:
        ValueError: no file has the name, or several have it.
    """
    (path,) = HERE.parent.glob(f"*/test_{name}.py")
    return f"tests/{path.relative_to(HERE.parent).as_posix()}"


def jobs() -> list[Job]:
    """Return all jobs, in the order in which they are started."""
    files = " ".join(file_of_tests(name) for name in KERNEL_TESTS.split())
    commit = ("--commit", "$COMMIT")
    tested = script("record.py", "$OUT", "--parts", "tests", *commit, "--select", files)
    # the first run compiles the kernels
    plain = f"{sys.executable} {HERE / 'sanitized.py'}"
    checked = "{0} {1} && compute-sanitizer --tool memcheck --error-exitcode 1 {0} {1}"
    judge = script("verdicts.py", "$OUT", *commit, "--adapters")
    twin = (*judge, "optimized", "--limit", "330", "--workers", "14")
    others = (*judge, "flex_compiled,vllm_unified", "--limit", "150", "--workers", "7")
    tried = script("campaign.py", "$OUT", *commit, "--minutes", "8")
    tried += ("--batches", "4096", *(["--mps"] if shutil.which(MPS) else []))
    only = ("--only", "attention is right for every batch")
    across = script("serving/ranks.py", "$OUT/ranks.jsonl")
    ranks = ("--ranks", "2", "--json", "$OUT/parallel.json")
    return [
        Job("tests", (*tested, "--limit-tests", "240"), 270),
        Job("bench", bench("standard", "bench"), 150, OWN, is_engine=True),
        Job(
            "bench-extended",
            bench("extended", "bench-extended"),
            240,
            OWN,
            is_engine=True,
        ),
        *(
            Job(
                f"sanitizer-{checked_kernel}",
                ("sh", "-c", checked.format(plain, checked_kernel)),
                150,
            )
            for checked_kernel in SANITIZED.split()
        ),
        Job("serving", script("serving/several.py", "$OUT"), 560, ALL, is_engine=True),
        Job(
            "campaign",
            (*tried, *only, "--archive", "$OUT/campaign.tar.gz"),
            560,
            ALL,
        ),
        Job("laws", twin, 430, ALL),
        Job("verdicts", others, 250, is_engine=True),
        *(
            Job(f"sweep-{kind}", sweep(kind), 240, OWN, is_engine=True)
            for kind in ("decode", "verify", "write")
        ),
        Job("warm-up", script("warm_up.py", "--threads", "1", "16"), 200, ALL),
        Job("equality", script("serving/phases.py", "$OUT"), 560, OWN, is_engine=True),
        Job("parallel", script("parallel.py", *ranks), 200, ALL, gpus=2),
        Job("ranks", across, 400, ALL, gpus=2, is_engine=True),
    ]


def place_on(job: Job, running: dict[Job, list[int]], gpus: int) -> list[int] | None:
    """Return the GPUs on which a job can start now, or None.

    Args:
        job: the next one.
        running: the jobs that are running, with their GPUs.
        gpus: how many the host has.
    """
    if any(other.place == ALL for other in running) or (job.place == ALL and running):
        return None
    if job.place == ALL:
        return [*range(gpus)]
    users: list[list[Job]] = [[] for _ in range(gpus)]
    for other, places in running.items():
        for gpu in places:
            users[gpu].append(other)
    free = [
        gpu
        for gpu in range(gpus)
        if not users[gpu] or (job.place == SHARED and users[gpu][0].place == SHARED)
    ]
    return [min(free, key=lambda gpu: len(users[gpu]))] if free else None


class Release:
    """A run of jobs.

    Args:
        folder: of their results.
        gpus: the visible ones, as values of CUDA_VISIBLE_DEVICES.
        commit: that the records name.
        until: time.time() at which all jobs must have ended.
    """

    def __init__(
        self, folder: Path, gpus: list[str], commit: str, until: float
    ) -> None:
        self.folder, self.gpus, self.commit, self.until = folder, gpus, commit, until
        self.running: dict[Job, list[int]] = {}

    def read_codes(self) -> dict[str, int | None]:
        """Return the last exit code of each job that has ended. None means that it was stopped."""
        file = self.folder / "jobs.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return {line["job"]: line["code"] for line in map(json.loads, lines)}

    def run_job(self, job: Job, places: list[int]) -> None:
        """Run one job on these GPUs, and write how it ended."""
        folder = self.folder / job.name
        folder.mkdir(parents=True, exist_ok=True)
        values = {"OUT": str(folder), "COMMIT": self.commit}
        command = [Template(word).substitute(values) for word in job.command]
        paths = [environment()["PYTHONPATH"], os.environ.get("VLLM_PATH", "")]
        began = time.time()
        code, _ = run_limited(
            command,
            job.seconds,
            folder / "log.txt",
            CUDA_VISIBLE_DEVICES=",".join(self.gpus[place] for place in places),
            PYTHONPATH=os.pathsep.join(paths if job.is_engine else paths[:1]),
        )
        line = {"job": job.name, "code": code, "seconds": round(time.time() - began, 1)}
        print(json.dumps(line), flush=True)
        with (self.folder / "jobs.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def run(self, asked: list[Job]) -> int:
        """Run jobs in their order, and return the exit code of the whole run."""
        done = self.read_codes()
        waiting = deque(job for job in asked if done.get(job.name) != 0)
        left: list[str] = []
        futures: dict[Future[None], Job] = {}
        with ThreadPoolExecutor(len(asked)) as pool:
            while waiting or futures:
                while waiting:
                    job = waiting[0]
                    fits = time.time() + job.seconds <= self.until
                    if not fits or job.gpus > len(self.gpus):
                        left.append(waiting.popleft().name)
                        continue
                    places = place_on(job, self.running, len(self.gpus))
                    if places is None:
                        break
                    self.running[waiting.popleft()] = places
                    futures[pool.submit(self.run_job, job, places)] = job
                ended, _ = wait(futures, return_when=FIRST_COMPLETED)
                for future in ended:
                    future.result()
                    del self.running[futures.pop(future)]
        codes = self.read_codes()
        failed = {name: code for name, code in codes.items() if code != 0}
        print(f"failed: {failed or 'none'}; not started: {left or 'none'}", flush=True)
        return 1 if failed else 2 if left else 0


def visible_gpus() -> list[str]:
    """Return the visible GPUs; one empty name without a GPU."""
    if names := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return names.split(",")
    import torch

    return [str(index) for index in range(torch.cuda.device_count())] or [""]


def main() -> int:
    """Run the jobs that were asked for, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("folder", type=Path)
    add("--minutes", type=float, default=60.0, help="of this run")
    add("--only", nargs="+", help="names of jobs")
    add("--list", action="store_true", help="print the names and limits alone")
    add("--commit", help="default: what git says")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    known = {job.name: job for job in jobs()}
    if unknown := set(asked.only or ()) - set(known):
        parser.error(
            f"--only {' '.join(unknown)}: expected names of {', '.join(known)}"
        )
    chosen = [job for job in known.values() if not asked.only or job.name in asked.only]
    if asked.list:
        for job in chosen:
            print(f"{job.name:18} {job.seconds:4.0f} s  {job.place}")
        return 0
    said = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    commit = asked.commit or said.stdout.strip() or "unknown"
    folder.mkdir(parents=True, exist_ok=True)
    until = time.time() + 60 * asked.minutes
    return Release(folder, visible_gpus(), commit, until).run(chosen)


if __name__ == "__main__":
    sys.exit(main())
