"""Worker processes: how many of them there may be, and the GPUs that each of them can use."""

import os

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that a process reads when it uses CUDA for the first time."""


MOST_WORKERS = 8
"""Processes that any machine may be asked for. Each of them takes some 200 MB."""


def most_workers() -> int:
    """Return the largest number of worker processes: two per core, or MOST_WORKERS."""
    return max(MOST_WORKERS, 2 * (os.cpu_count() or 1))


def check_workers(workers: int) -> None:
    """Raise if this machine cannot run such a number of processes."""
    if workers < 1:
        raise ValueError(f"workers = {workers}: expected at least 1")
    if workers > most_workers():
        raise ValueError(
            f"workers = {workers}: expected at most {most_workers()}, which is two per core of"
            f" this machine, or {MOST_WORKERS}"
        )


def visible_gpus() -> list[str]:
    """Return the GPUs that this process can use, as CUDA_VISIBLE_DEVICES names them.

    They are numbers or UUIDs, in the order in which torch numbers them.
    """
    import torch

    count = torch.cuda.device_count()
    given = os.environ.get(VISIBLE)
    names = map(str, range(count)) if given is None else given.split(",")
    return [name.strip() for name in names][:count]


def gpus_of_workers(device: str, workers: int) -> list[str | None]:
    """Return the only GPU that each worker process can use, or None if it can use all of them.

    Args:
        device: The device of the tensors. Workers on "cuda" take the visible GPUs in turn. All
            workers on "cuda:1" use the second one. Workers on "cpu" use none.
        workers: Number of processes. A single one on "cuda" can use all GPUs.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda" or (workers == 1 and not index):
        return [None] * workers
    gpus = visible_gpus()
    if index:
        return [gpus[int(index)]] * workers
    return [gpus[number % len(gpus)] if gpus else None for number in range(workers)]
