"""The parallel step on several GPUs of a host: laws, bits, faults, and times under CUDA graphs.

    python tests/gpu/parallel.py --ranks 2 --json FILE

Each rank is a process with a GPU of its own, and communicates through NCCL, and through symmetric
memory (`SymmetricRanks`). The first process prints the results, and writes them to FILE. Without a
GPU the laws run through gloo: `--ranks 2 --only optimized,reference`. Set NCCL_NVLS_ENABLE=0 and
TORCH_SYMM_MEM_DISABLE_MULTICAST=1 where the GPUs of a host are shared with others.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pagetwin.conformance.harness.interpreter import speed_up
from pagetwin.engine.rank_group import RankGroup
from parallel_job import DEVICE, Job
from parallel_laws import hold_all, lose_a_rank
from torch import distributed as dist
from torch import multiprocessing

LIMIT_S = 3.0
"""Time limit of the group in which a rank ends."""


def connect(rank: int, world_size: int, store: str) -> dict[str, RankGroup]:
    """Return the groups of this rank."""
    stores: Any = dist
    file = stores.FileStore(store, world_size)
    given: dict[str, Any] = {"backend": "gloo"}
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        where = torch.device("cuda", rank)
        given = {"backend": "cpu:gloo,cuda:nccl", "device_id": where}
    dist.init_process_group(store=file, rank=rank, world_size=world_size, **given)
    torch.manual_seed(rank)
    reports = stores.PrefixStore("reports", file)
    group = dist.group.WORLD if world_size > 1 else None
    ranks = RankGroup(group, timeout=30.0, store=reports, device=DEVICE)
    if DEVICE == "cpu":
        return {"gloo": ranks}
    groups = {"nccl": ranks}
    if world_size > 1:
        try:
            from pagetwin.optimized import SymmetricRanks

            groups["symmetric"] = SymmetricRanks(
                group, 8 << 20, timeout=10.0, store=reports, device=DEVICE
            )
        except Exception as error:
            print(f"rank {rank}: no symmetric memory: {error}", flush=True)
    return groups


def sections(job: Job, laws: str) -> dict[str, Callable[[], None]]:
    """Return what can be run, in this order."""
    found: dict[str, Callable[[], None]] = {
        f"{name} {way}": partial(hold_all, job, name, way, laws)
        for name in ("optimized", "reference")
        for way in job.groups
    }
    if DEVICE == "cuda":
        from parallel_times import DECODES, time_decode, time_prefill

        found |= {name: partial(time_decode, name, job) for name in DECODES}
        found["prefill-1x32k"] = partial(time_prefill, job)
    return found


def work(rank: int, given: argparse.Namespace) -> None:
    """Run the sections on one rank."""
    begin = time.monotonic()
    if DEVICE == "cpu":
        speed_up()
    job = Job(connect(rank, given.ranks, given.store))
    job.say("start", "process groups", seconds=time.monotonic() - begin)
    if given.only == "fault":
        for way, ranks in job.groups.items():
            answer = lose_a_rank(ranks, LIMIT_S) if way == given.way else ""
            if answer:
                job.say(f"fault: {way}", answer)
        leave(job, given, rank)
    for name, section in sections(job, given.laws).items():
        if given.only and not {*name.split(), name} & {*given.only.split(",")}:
            continue
        try:
            section()
        except Exception as error:
            text = f"FAILED: rank {rank}: {type(error).__name__}: {str(error)[:400]}"
            print(f"{name}: {text}", flush=True)
            job.found[f"{name} failed"] = text
        job.say(f"seconds: {name}", "since the start", seconds=time.monotonic() - begin)
    leave(job, given, rank)


def leave(job: Job, given: argparse.Namespace, rank: int) -> None:
    """Write the record, and end the process without waiting for captured graphs or lost ranks."""
    if rank == 0 and given.json:
        path = Path(given.json)
        before = json.loads(path.read_text())["found"] if path.exists() else {}
        record = describe(given) | {"found": before | job.found}
        path.write_text(json.dumps(record, indent=1) + "\n")
    os._exit(0)


def describe(given: argparse.Namespace) -> dict[str, Any]:
    """Return the commit, the date, the devices and the versions."""
    if DEVICE == "cpu":
        return {"devices": ["cpu"] * given.ranks, "torch": torch.__version__}
    nccl: Any = torch.cuda.nccl
    return {
        "commit": given.commit,
        "date": datetime.date.today().isoformat(),
        "devices": [torch.cuda.get_device_name(each) for each in range(given.ranks)],
        "torch": torch.__version__,
        "nccl": ".".join(map(str, nccl.version())),
        "triton": importlib.metadata.version("triton"),
    }


def main() -> None:
    """Start one process per GPU."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--store", default=f"/tmp/parallel-{os.getpid()}")
    parser.add_argument("--only", default="", help="twins, groups, workloads, or fault")
    parser.add_argument("--laws", default="", help="some of parallel_laws.HELD")
    parser.add_argument("--way", default="nccl", help="group in which a rank ends")
    parser.add_argument("--json", default="", help="where the record is written")
    parser.add_argument("--commit", default="", help="what the record names")
    parser.add_argument("--limit", type=float, default=110.0, help="seconds")
    given = parser.parse_args()
    print(f"{given.ranks} x {DEVICE}, torch {torch.__version__}", flush=True)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=work, args=(rank, given)) for rank in range(given.ranks)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + given.limit
    for process in processes:
        process.join(max(0.1, end - time.monotonic()))
    for rank, process in enumerate(processes):
        if process.is_alive():
            print(
                f"FAILED: rank {rank} has not ended after {given.limit} s", flush=True
            )
            process.kill()
    Path(given.store).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
