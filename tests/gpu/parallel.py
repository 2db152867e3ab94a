"""The parallel step on several GPUs of a host: laws, bits, faults, and times under CUDA graphs.

    python tests/gpu/parallel.py --ranks 2 --json FILE
    python tests/gpu/parallel.py --ranks 4 --json FILE
    python tests/gpu/parallel.py --ranks 4 --only fault --json FILE

Each rank is a process with a GPU of its own, and communicates through NCCL, and through symmetric
memory (`SymmetricRanks`). The first process prints what begins and what was found, and writes the
results to FILE. A rank that has not ended after `--limit` seconds prints where it waits. The laws
run on two to eight ranks, the times on numbers that divide the heads. Without a GPU the laws run
through gloo: `--ranks 3 --only optimized,reference`. Set NCCL_NVLS_ENABLE=0 and
TORCH_SYMM_MEM_DISABLE_MULTICAST=1 where the GPUs of a host are shared with others.
"""

import argparse
import datetime
import faulthandler
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pagetwin.conformance.running.interpreter import speed_up
from pagetwin.engine.rank_group import RankGroup
from parallel_job import DEVICE, Job
from parallel_laws import FAULTS, RanksApart, hold_all
from torch import distributed as dist
from torch import multiprocessing

LIMIT_S = 3.0
"""Time limit of the group in which a rank ends."""


def connect(
    rank: int, world_size: int, store: str, limit_s: float
) -> dict[str, RankGroup]:
    """Return the groups of this rank.

    Args:
        limit_s: of collectives that compare results; those of steps have limits of their own.
    """
    stores: Any = dist
    file = stores.FileStore(store, world_size)
    given: dict[str, Any] = {"backend": "gloo"}
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        where = torch.device("cuda", rank)
        given = {"backend": "cpu:gloo,cuda:nccl", "device_id": where}
    given["timeout"] = datetime.timedelta(seconds=limit_s)
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
        from parallel_times import DECODES, HEADS, time_decode, time_prefill

        if HEADS % job.ranks.world_size:
            return found
        found |= {name: partial(time_decode, name, job) for name in DECODES}
        found["prefill-1x32k"] = partial(time_prefill, job)
    return found


def work(rank: int, given: argparse.Namespace) -> None:
    """Run the sections on one rank."""
    begin = time.monotonic()
    # where each rank waits
    faulthandler.dump_traceback_later(given.limit, exit=True)
    if DEVICE == "cpu":
        speed_up()
    job = Job(connect(rank, given.ranks, given.store, given.limit))
    job.say("start", "process groups", seconds=time.monotonic() - begin)
    if given.fault:
        fault, way = given.fault
        answer = FAULTS[fault](job.groups[way], LIMIT_S)
        if answer:
            print(f"rank {rank}: {answer}", flush=True)
            job.found[f"fault: {fault} {way}"] = {"text": answer}
        leave(job, given, rank)
    for name, section in sections(job, given.laws).items():
        if given.only and not {*name.split(), name} & {*given.only.split(",")}:
            continue
        job.announce(name)
        try:
            section()
        except Exception as error:
            text = f"FAILED: rank {rank}: {type(error).__name__}: {str(error)[:400]}"
            print(f"{name}: {text}", flush=True)
            job.found[f"{name} failed"] = {"text": text}
            if isinstance(error, RanksApart):
                break
        job.say(f"seconds: {name}", "since the start", seconds=time.monotonic() - begin)
    leave(job, given, rank)


def leave(job: Job, given: argparse.Namespace, rank: int) -> None:
    """Write the record, and end the process without waiting for captured graphs or lost ranks."""
    if rank == 0 and given.json:
        path = Path(given.json)
        before = json.loads(path.read_text())["found"] if path.exists() else {}
        record = describe(given) | {"found": before | job.found}
        path.write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(int(job.has_failed()))


def describe(given: argparse.Namespace) -> dict[str, Any]:
    """Return the commit, the date, the devices and the versions."""
    if DEVICE == "cpu":
        return {"devices": ["cpu"] * given.ranks, "torch": torch.__version__}
    nccl: Any = torch.cuda.nccl
    return {
        "commit": given.commit,
        "date": datetime.date.today().isoformat(),
        "devices": [
            torch.cuda.get_device_name(device) for device in range(given.ranks)
        ],
        "torch": torch.__version__,
        "nccl": ".".join(map(str, nccl.version())),
        "triton": importlib.metadata.version("triton"),
    }


def start(given: argparse.Namespace) -> bool:
    """Start one process per GPU, and return whether all have ended without a failure."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=work, args=(rank, given)) for rank in range(given.ranks)
    ]
    for process in processes:
        process.start()
    # a rank prints where it waits, and ends, a little earlier
    end = time.monotonic() + given.limit + 30
    for process in processes:
        process.join(max(0.1, end - time.monotonic()))
    for rank, process in enumerate(processes):
        if process.exitcode != 0:
            print(f"FAILED: rank {rank}: exit code {process.exitcode}", flush=True)
            process.kill()
    Path(given.store).unlink(missing_ok=True)
    return all(process.exitcode == 0 for process in processes)


def main() -> None:
    """Run the sections, or each fault in processes of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--store", default=f"/tmp/parallel-{os.getpid()}")
    parser.add_argument("--only", default="", help="twins, groups, workloads, or fault")
    parser.add_argument("--laws", default="", help="some of parallel_laws.HELD")
    parser.add_argument("--json", default="", help="where the record is written")
    parser.add_argument("--commit", default="", help="what the record names")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds")
    given = parser.parse_args()
    print(f"{given.ranks} x {DEVICE}, torch {torch.__version__}", flush=True)
    ways = ("nccl", "symmetric") if DEVICE == "cuda" else ("gloo",)
    faults: list[Any] = [None]
    if given.only == "fault":
        faults = [(fault, way) for fault in FAULTS for way in ways]
    are_right = []
    for given.fault in faults:
        if given.fault:
            print(f"fault: {' '.join(given.fault)}", flush=True)
        are_right.append(start(given))
    sys.exit(not all(are_right))


if __name__ == "__main__":
    main()
