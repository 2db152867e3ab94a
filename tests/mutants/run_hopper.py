"""Try generated mutants of the kernels for Hopper in the Gluon interpreter, and record their ends.

    make mutants-hopper ARGUMENTS="--sample 300 --seed 0"      # what the record lacks of a sample
    make mutants-hopper ARGUMENTS="fp8 --sample 300 --seed 0"  # of those with a word in their ids

The calls are those of `hopper_calls.py`: each is computed by the changed kernel and compared with
float64, and the interpreter reports what a GPU would not. Killed is a mutant that a call notices;
equivalent is one whose reason is in hopper_equivalent.toml; all others are alive. Layouts
of registers are not interpreted; what runs on the host has other tests.
"""

import argparse
import math
import multiprocessing
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .isolation import isolate

if __name__ == "__main__":
    isolate()

import torch
from pagetwin.gluon_interpreter.kernels import change_module

from .generate import OPERATORS, Generated, sample
from .hopper import folder_of, hopper_mutants
from .hopper_calls import CALLS
from .record import (
    HOPPER_RECORD,
    Entry,
    is_current,
    make_entry,
    read_record,
    summary,
    write_todays,
)

USERS: dict[str, list[str]] = {
    "common": [],
    "prefill": [],
    "invariant": ["invariant", "append"],
    "code_decode": ["code_decode", "code_prefill"],
}
"""Families that run the files of a folder, if not its own alone; all if the list is empty."""
CPU_SECONDS = 60
"""CPU time that one call may take, 20 times that of the slowest one; a longer one hangs."""
SECONDS = 3600.0
"""Time that all calls of one mutant may take, in case that a process waits without CPU time."""


def order_calls(mutant: Generated, killers: Counter[tuple[str, str]]) -> list[str]:
    """Return the names of the calls that can notice a mutant, the likeliest and smallest first."""
    folder = folder_of(mutant.file)
    families = USERS.get(folder, [folder])
    own = [
        name for name, call in CALLS.items() if not families or call.family in families
    ]
    return sorted(
        own,
        key=lambda name: (
            -killers[_module_of(mutant.id), name],
            CALLS[name].family != folder,
            CALLS[name].size,
        ),
    )


def try_calls(mutant: Generated, names: Sequence[str], sender: Connection) -> None:
    """Make calls of a mutant until one fails, and send its name and what was wrong.

    The process ends by SIGXCPU in a call that takes longer than CPU_SECONDS.
    """
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    module = f"pagetwin.{mutant.file.removesuffix('.py').replace('/', '.')}"
    found = "", ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / Path(mutant.file).name
        path.write_text(mutant.source(), encoding="utf-8")
        for name in names:
            limit = math.ceil(time.process_time()) + CPU_SECONDS
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            try:
                with change_module(module, path):
                    CALLS[name].check()
            except Exception as error:
                found = name, f"{type(error).__name__}: {' '.join(str(error).split())}"
                break
    sender.send(found)


def judge(
    mutants: Sequence[Generated], workers: int, known: Mapping[str, Entry]
) -> Iterator[tuple[Entry, str, float]]:
    """Yield the entry of each mutant, what was wrong, and seconds."""
    killers = Counter((_module_of(entry.id), entry.by) for entry in known.values())
    waiting = list(mutants)
    running: dict[Connection, tuple[Any, Generated, float]] = {}
    context = multiprocessing.get_context("fork")
    while waiting or running:
        while waiting and len(running) < workers:
            mutant = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            names = order_calls(mutant, killers)
            process = context.Process(target=try_calls, args=(mutant, names, sender))
            process.start()
            sender.close()
            running[receiver] = process, mutant, time.monotonic()
        ready = wait(list(running), timeout=1)
        for receiver, (process, mutant, begin) in list(running.items()):
            seconds = time.monotonic() - begin
            how, call, what = "alive", "", ""
            if receiver in ready:
                try:
                    call, what = receiver.recv()
                    how = "killed" if call else "alive"
                except EOFError:
                    process.join()
                    how, what = "crashes", f"exit code {process.exitcode}"
                    if process.exitcode == -signal.SIGXCPU:
                        how = "hangs"
                        what = f"no end within {CPU_SECONDS} s of CPU time"
            elif seconds > SECONDS:
                process.kill()
                how, what = "hangs", f"no end within {SECONDS:.0f} s"
            else:
                continue
            process.join()
            del running[receiver]
            killers[_module_of(mutant.id), call] += 1
            yield make_entry(mutant, how, call), what, seconds


def _module_of(name: str) -> str:
    """Return the file of a mutant's id, without its suffix."""
    return name.rsplit("/", 3)[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 0 if no mutant is alive that is not explained."""
    parser = argparse.ArgumentParser(description="Try mutants of the Hopper kernels")
    parser.add_argument(
        "words", nargs="*", help="draw of mutants with such words in their ids"
    )
    parser.add_argument("--sample", type=int, default=300, help="mutants of the sample")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--again", action="store_true", help="also those of the record")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--record", type=Path, default=HOPPER_RECORD)
    given = parser.parse_args(arguments)
    mutants = hopper_mutants()
    named = [
        mutant
        for mutant in mutants
        if not given.words or any(word in mutant.id for word in given.words)
    ]
    chosen = sample(named, given.sample, given.seed)
    known = read_record(given.record)
    if not given.again:
        chosen = [
            mutant for mutant in chosen if not is_current(mutant, known.get(mutant.id))
        ]
    change_of = {mutant.id: mutant.change for mutant in chosen}
    for entry, what, seconds in judge(chosen, given.workers, known):
        known[entry.id] = entry
        words = f"{entry.how} {entry.by}: {what[:100]}"
        print(f"{seconds:6.1f} s {entry.id}: {words}", flush=True)
        if entry.how == "alive":
            print(f"          alive: {change_of[entry.id]}", flush=True)
        write_todays(given.record, mutants, known)
    write_todays(given.record, mutants, known)
    entries = [*read_record(given.record).values()]
    operator_of = {mutant.id: mutant.operator for mutant in mutants}
    print("\n".join(summary(OPERATORS, operator_of, entries)))
    return int(any(entry.how == "alive" for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
