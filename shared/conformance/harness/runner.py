"""How is an implementation tried against every law?

Each law gets its cases one after another until one breaks it; then Hypothesis looks for a smaller
one. All of this runs in a process of its own: a kernel that crashes takes that process down, which
is reported as a failure of the law at hand, with the input at which it happened, and a new process
goes on with the next. Several processes share the laws out, if asked to.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from queue import SimpleQueue

import torch

from ..laws.all_laws import ALL_LAWS
from .candidate import load_candidate
from .law import Law
from .report import Report, Result, Status
from .trial import find_law, make_case, make_setting, run_law, try_law
from .worker import SECONDS_OF_A_LAW, Job, Worker


def check_implementation(
    implementation: str,
    only: str | None = None,
    seed: int = 0,
    examples: int = 25,
    device: str | None = None,
    known_failures: Mapping[str, str] | None = None,
    isolated: bool = True,
    seconds_of_a_law: float = SECONDS_OF_A_LAW,
    on_result: Callable[[Result], None] = lambda result: None,
    workers: int = 1,
) -> Report:
    """Return how an implementation does on every law.

    Args:
        implementation: "reference", "optimized", the dotted name of a package or module that has
            some of the operations under their names, or the path of a .py file.
        only: words that the sentence or the area of a law must contain; None: all laws.
        seed: what drawn cases are drawn from.
        examples: drawn cases of a law.
        device: where tensors lie; None: CUDA if there is one.
        known_failures: laws that are known to be broken, each with the reason. One that holds
            is a failure.
        isolated: whether laws run in a process of their own; False: in this one, which a
            crash then ends.
        seconds_of_a_law: a law that takes longer counts as crashed, if it is isolated.
        on_result: called with what became of each law, as soon as that is known.
        workers: processes that share the laws out. The report does not depend on them.

    Raises:
        ModuleNotFoundError, ImportError: no such implementation, or it cannot be imported.
        ValueError: it has none of the operations, no law contains the words, a known failure names
            no law, or a number is out of range.
    """
    laws = choose_laws(only)
    known = check_known_failures(known_failures)
    for name, number in (("examples", examples), ("workers", workers)):
        if number < 1:
            raise ValueError(f"{name} = {number}: expected at least 1")
    if workers > 1 and not isolated:
        raise ValueError(
            f"workers = {workers} with isolated = False: expected 1, which is this process"
        )
    device = choose_device(device)
    results: dict[str, Result] = {}
    with _trying(
        implementation, device, isolated, seconds_of_a_law, min(workers, len(laws))
    ) as try_all:
        for law, result in try_all(laws, seed, examples):
            results[law.name] = with_known(result, known.get(law.name))
            on_result(results[law.name])
    options = {"seed": seed, "examples": examples}
    in_order = tuple(results[law.name] for law in laws)
    return Report(implementation, device, in_order, options)


def choose_laws(only: str | None) -> list[Law]:
    """Return the laws whose sentence or area contains some words.

    Raises:
        ValueError: none does.
    """
    words = (only or "").lower()
    chosen = [law for law in ALL_LAWS if words in f"{law.area} {law.name}".lower()]
    if not chosen:
        areas = ", ".join(dict.fromkeys(law.area for law in ALL_LAWS))
        raise ValueError(f"only = {only!r}: no law contains it; areas are {areas}")
    return chosen


def choose_device(device: str | None) -> str:
    """Return where tensors lie: CUDA, if nothing is said and there is one.

    Raises:
        ValueError: no such device here.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device = {device!r}: expected cpu or cuda")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device = {device!r}: no GPU is usable here; expected cpu")
    return device


def check_known_failures(known_failures: Mapping[str, str] | None) -> dict[str, str]:
    """Return what is known to fail, by law.

    Raises:
        ValueError: a name of no law.
    """
    known = dict(known_failures or {})
    if unknown := sorted(set(known) - {law.name for law in ALL_LAWS}):
        raise ValueError(
            f"known_failures names {unknown}: expected sentences of laws, as a report shows them"
        )
    return known


def reproduce(
    implementation: str, law: str, case: str, device: str | None = None
) -> None:
    """Run one law on one case, in this process; a broken law raises.

    Args:
        implementation: as of `check_implementation`.
        law: its sentence.
        case: the case as Python, as a report shows it.
        device: where tensors lie; None: CUDA if there is one.

    Raises:
        Disagreement: the law is broken.
        ValueError: there is no such law.
    """
    found = find_law(law)
    setting = make_setting(load_candidate(implementation), choose_device(device))
    run_law(found, setting, make_case(found, case))


def with_known(result: Result, reason: str | None) -> Result:
    """Return a result in the light of what is known to fail."""
    if reason is None:
        return result
    holds = result.status in (Status.HELD, Status.OUTSIDE)
    return replace(
        result, status=Status.UNEXPECTED if holds else Status.KNOWN, reason=reason
    )


@contextmanager
def _trying(
    implementation: str, device: str, isolated: bool, seconds: float, workers: int
) -> Iterator[Callable[[list[Law], int, int], Iterator[tuple[Law, Result]]]]:
    """Yield what tries laws: in processes of their own, or in this one."""
    if not isolated:
        setting = make_setting(load_candidate(implementation), device)
        yield lambda laws, seed, examples: (
            (law, try_law(law, setting, seed, examples)) for law in laws
        )
        return
    with ExitStack() as ended:
        free: SimpleQueue[Worker] = SimpleQueue()
        for _ in range(workers):
            worker = Worker(implementation, device, seconds)
            ended.callback(worker.stop)
            free.put(worker)
        # what cannot be imported is told before anything is tried
        worker.start()
        pool = ThreadPoolExecutor(workers)
        ended.callback(pool.shutdown, cancel_futures=True)

        def try_one(law: Law, job: Job) -> Result:
            worker = free.get()
            try:
                return worker.try_law(job, law.area)
            finally:
                free.put(worker)

        def try_all(
            laws: list[Law], seed: int, examples: int
        ) -> Iterator[tuple[Law, Result]]:
            tried = {
                pool.submit(try_one, law, Job(law.name, seed, examples)): law
                for law in laws
            }
            for each in as_completed(tried):
                yield tried[each], each.result()

        yield try_all
