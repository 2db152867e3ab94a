"""Fuzzing: laws tried on new seeds for a number of minutes, with a corpus of failing cases.

In each round, every law that still holds is tried on a new seed. Cases that break a law or crash
are stored in a folder: the corpus, which the next run tries first, and a program for each broken
law that reproduces the failure. A broken law is not tried on more seeds until its case is fixed.
"""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis.strategies import SearchStrategy

from .report import Report, Result, Status
from .runner import choose_device, choose_laws
from .worker import SECONDS_OF_A_LAW, Job, Worker

CORPUS = Path(".pagetwin") / "fuzz"
"""Default folder of the corpus."""


@dataclass
class Fuzzing:
    """The result of a fuzzing run.

    Args:
        implementation: The implementation that was tried.
        device: The device of its tensors.
        cases: Number of cases that were tried, without those of the corpus.
        rounds: Number of passes over all laws.
        broken: The failing result of each broken law.
        fixed: Laws whose case in the corpus no longer breaks them.
        missing: Laws that need an operation that the implementation does not have.
        programs: Files that reproduce broken laws.
    """

    implementation: str
    device: str
    cases: int = 0
    rounds: int = 0
    broken: dict[str, Result] = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    programs: list[Path] = field(default_factory=list)


def fuzz_implementation(
    implementation: str,
    minutes: float,
    corpus: Path = CORPUS,
    only: str | None = None,
    examples: int = 50,
    device: str | None = None,
    seconds_of_a_law: float = SECONDS_OF_A_LAW,
    on_result: Callable[[Fuzzing, Result], None] = lambda run, result: None,
) -> Fuzzing:
    """Return the result of trying laws on new seeds for some minutes.

    Args:
        implementation: As in `check_implementation`.
        minutes: Time limit. It also stops the law that is running. Cases of the corpus are tried
            first, all of them, and their time is not counted.
        corpus: Folder of the cases that broke a law or crashed before. It is modified, and created
            if it does not exist.
        only: Optional. Words that the sentence or the area of a law must contain. If None, all
            laws are tried.
        examples: Number of drawn cases per law in each round.
        device: Optional. The device of the tensors. If None, CUDA if it is available, else the
            CPU.
        seconds_of_a_law: A law that takes longer is reported as crashed.
        on_result: Called with the run so far and the result of a law.

    Raises:
        ModuleNotFoundError, ImportError: The implementation does not exist or cannot be imported.
        ValueError: The implementation has none of the operations, no law contains the words, the
            corpus cannot be read, or a number is out of range.
    """
    if not minutes > 0:
        raise ValueError(f"minutes = {minutes:g}: expected more than 0")
    laws = choose_laws(only)
    device = choose_device(device)
    run = Fuzzing(implementation, device)
    folder = corpus / re.sub(r"\W+", "_", implementation).strip("_")
    stored, seed = _read(folder / "corpus.json")
    by_name = {law.name: law for law in laws}
    worker = Worker(implementation, device, seconds_of_a_law)
    try:
        worker.start()
        # step: try the cases of the corpus
        for name, case in stored.items():
            if name not in by_name:
                continue  # excluded by `only`, and kept in the corpus
            result = worker.try_law(Job(name, case=case), by_name[name].area)
            if result.ok:
                run.fixed.append(name)
            else:
                run.broken[name] = result
            on_result(run, result)
        deadline = time.monotonic() + 60 * minutes
        # step: try new seeds until the deadline
        while time.monotonic() < deadline:
            for law in laws:
                drawn = isinstance(law.cases, SearchStrategy)
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                if law.name in run.broken or law.name in run.missing:
                    continue
                if run.rounds and not drawn:
                    continue  # a list of cases is the same in every round
                worker.seconds_of_a_law = min(seconds_of_a_law, left)
                result = worker.try_law(Job(law.name, seed, examples), law.area)
                run.cases += result.cases
                cut_short = time.monotonic() >= deadline
                if result.status == Status.MISSING:
                    run.missing.append(law.name)
                elif not result.ok and not (
                    cut_short and result.status == Status.CRASHED
                ):
                    run.broken[law.name] = result
                on_result(run, result)
            run.rounds += 1
            seed += 1
            if all(
                law.name in run.broken
                or law.name in run.missing
                or not isinstance(law.cases, SearchStrategy)
                for law in laws
            ):
                break  # no law remains that can be tried on new seeds
    finally:
        worker.stop()
        # step: store failing cases, and remove those that are fixed
        kept = {name: case for name, case in stored.items() if name not in run.fixed}
        kept |= {
            name: result.case for name, result in run.broken.items() if result.case
        }
        if kept or folder.exists():
            _write(folder, run, kept, seed)
    return run


def _read(file: Path) -> tuple[dict[str, str], int]:
    """Return the case of each law in a corpus, and the next seed."""
    if not file.exists():
        return {}, 0
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return dict(found["cases"]), int(found["next_seed"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"corpus = {file}: expected a file that `pagetwin fuzz` wrote; remove it to start anew"
        ) from None


def _write(folder: Path, run: Fuzzing, cases: dict[str, str], seed: int) -> None:
    """Write the corpus, and a program for each law that this run found broken."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {"next_seed": seed, "cases": cases}
    (folder / "corpus.json").write_text(
        json.dumps(words, indent=1) + "\n", encoding="utf-8"
    )
    report = Report(run.implementation, run.device, (), {})
    for law in run.fixed:
        if law not in run.broken:
            _program(folder, law).unlink(missing_ok=True)
    for law, result in run.broken.items():
        if result.case:
            path = _program(folder, law)
            path.write_text(_words(report, result), encoding="utf-8")
            run.programs.append(path)


def _program(folder: Path, law: str) -> Path:
    return folder / f"{re.sub(r'[^a-z0-9]+', '_', law.lower())}.py"


def _words(report: Report, result: Result) -> str:
    """Return a program that reproduces a broken law. Its docstring shows the failure."""
    told = [f"{result.law}: {result.status}"]
    if result.what:
        told.append(
            f"{result.what}, {result.where}: {result.found}, right is {result.right}"
        )
    if result.message:
        told.append(result.message)
    words = "\n\n".join(told).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{words}\n"""\n\n{report.reproducer(result)}'
