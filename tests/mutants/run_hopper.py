"""Try generated mutants of the kernels for Hopper in the Gluon interpreter, and record their ends.

    make mutants-hopper ARGUMENTS="--sample 300 --seed 0"      # what the record lacks of a sample
    make mutants-hopper ARGUMENTS="fp8 --sample 300 --seed 0"  # of those with a word in their ids

The calls are those of `hopper_calls.py`: each is computed by the changed kernel and compared with
float64, and the interpreter reports what a GPU would not. Killed is a mutant that a call notices;
equivalent is one whose reason stands in hopper_equivalent.toml; all others have survived. Layouts
of registers are not interpreted; what runs on the host has other tests.
"""

import argparse
import ast
import json
import math
import multiprocessing
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .isolation import isolate

if __name__ == "__main__":
    isolate()

import torch
from gluon_interpreter.kernels import change_module

from .generate import OPERATORS, Generated, generate, read_reasons, sample
from .hopper_calls import CALLS
from .mutant import ROOT
from .record import REPORT as CATALOGUE_REPORT
from .record import entries_of

REPORT = CATALOGUE_REPORT.with_name("mutants-hopper.json")
REASONS = Path(__file__).parent / "hopper_equivalent.toml"
USERS: dict[str, list[str]] = {
    "sm90": [],
    "invariant": ["invariant", "append"],
    "fp8_decode": ["fp8_decode", "fp8_prefill"],
}
"""Families that run the files of a folder, if not its own alone; all if the list is empty."""
CPU_SECONDS = 60
"""CPU time that one call may take, 20 times that of the slowest one; a longer one hangs."""
SECONDS = 3600.0
"""Time that all calls of one mutant may take, in case that a process waits without CPU time."""


def hopper_files() -> list[str]:
    """Return the files with functions that the Gluon interpreter runs."""
    folder = ROOT / "optimized/kernels/sm90"
    return [
        path.relative_to(ROOT).as_posix()
        for path in sorted(folder.rglob("*.py"))
        if any(
            f"@{each}.jit" in path.read_text("utf-8") for each in ("gluon", "triton")
        )
    ]


def folder_of(file: str) -> str:
    """Return the name of a file's folder, which is that of its kernels."""
    return Path(file).parent.name


def without_layouts(mutants: Sequence[Generated]) -> list[Generated]:
    """Return the mutants that change more than a layout of registers, which is not interpreted."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for file in {each.file for each in mutants}:
        text = (ROOT / file).read_bytes()
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        spans[file] = [
            (
                starts[node.lineno - 1] + node.col_offset,
                starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0),
            )
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Layout")
        ]
    return [
        each
        for each in mutants
        if not any(
            begin <= each.begin and each.end <= end for begin, end in spans[each.file]
        )
    ]


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
            -killers[mutant.file, name],
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
    found: tuple[str | None, str] = None, ""
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
    mutants: Sequence[Generated], workers: int, known: dict[str, dict[str, Any]]
) -> Iterator[tuple[Generated, str | None, str, float]]:
    """Yield what became of each mutant: the case that noticed it, what was wrong, and seconds."""
    killers = Counter(
        (each["file"], each["case"]) for each in known.values() if each["case"]
    )
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
            case, what = None, ""
            if receiver in ready:
                try:
                    case, what = receiver.recv()
                except EOFError:
                    process.join()
                    case, what = "a crash", f"exit code {process.exitcode}"
                    if process.exitcode == -signal.SIGXCPU:
                        case = "a hang"
                        what = f"no end within {CPU_SECONDS} s of CPU time"
            elif seconds > SECONDS:
                process.kill()
                case, what = "a hang", f"no end within {SECONDS:.0f} s"
            else:
                continue
            process.join()
            del running[receiver]
            if case:
                killers[mutant.file, case] += 1
            yield mutant, case, what, seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 0 if no mutant survived that is not explained."""
    parser = argparse.ArgumentParser(description="Try mutants of the Hopper kernels")
    parser.add_argument(
        "words", nargs="*", help="draw of mutants with such words in their ids"
    )
    parser.add_argument("--sample", type=int, default=300, help="mutants of the sample")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--again", action="store_true", help="also those of the record")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--report", type=Path, default=REPORT)
    given = parser.parse_args(arguments)
    mutants = without_layouts(generate(hopper_files(), read_reasons(REASONS)))
    named = [
        each
        for each in mutants
        if not given.words or any(word in each.id for word in given.words)
    ]
    chosen = sample(named, given.sample, given.seed)
    known = entries_of(given.report)
    if not given.again:
        chosen = [each for each in chosen if not is_current(each, known.get(each.id))]
    for mutant, case, what, seconds in judge(chosen, given.workers, known):
        known[mutant.id] = {
            "id": mutant.id,
            "file": mutant.file,
            "change": mutant.change,
            "digest": digest_of(mutant),
            "operator": mutant.operator,
            "ended": "",
            "reason": "",
            "case": case,
            "what": what[:160],
        }
        print(f"{seconds:6.1f} s {mutant.id}: {case}: {what[:100]}", flush=True)
        if case is None:
            print(f"          survived: {mutant.change}", flush=True)
        save(given.report, mutants, known)
    record = save(given.report, mutants, known)
    counts = Counter(each["ended"] for each in record["mutants"])
    print(f"{len(record['mutants'])} of {len(mutants)} mutants: {dict(counts)}")
    return int("survived" in counts)


@cache
def digest_of(mutant: Generated) -> str:
    """Return the digest of a mutant, which takes two parses of its file, once per process."""
    return mutant.digest


def is_current(mutant: Generated, entry: dict[str, Any] | None) -> bool:
    """Return whether an entry of the record is of this mutant, and needs no new try."""
    if entry is None or entry["digest"] != digest_of(mutant):
        return False
    return bool(entry["case"]) or bool(mutant.equivalent)


def save(
    report: Path, mutants: Sequence[Generated], known: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Write the record of all mutants that were tried and still exist."""
    by_id = {each.id: each for each in mutants}
    held = []
    for name, entry in sorted(known.items()):
        if name not in by_id or entry["digest"] != digest_of(by_id[name]):
            continue
        entry["reason"] = "" if entry["case"] else by_id[name].equivalent
        entry["ended"] = (
            "killed"
            if entry["case"]
            else "equivalent"
            if entry["reason"]
            else "survived"
        )
        held.append(entry)
    record = {
        "generated": len(mutants),
        "folders": dict(Counter(folder_of(each.file) for each in mutants)),
        "operators": OPERATORS,
        "mutants": held,
    }
    report.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


if __name__ == "__main__":
    sys.exit(main())
