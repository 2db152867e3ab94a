"""Runner: tries an implementation on all laws and returns a report.

The cases of a law are tried one after another until one breaks it. Then Hypothesis searches for a
smaller failing case, which is tried again before it is reported. The laws run in a worker process.
A fatal error ends that process; the law that was running is tried on that input in a fresh process
and reported with it, and another one continues with the next law. If laws of an operation keep
ending the process at their first call, and none of them was judged, its other laws are reported as
not tried. The laws can be distributed over several processes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from queue import SimpleQueue

from ..base.results import Result, Status
from ..base.results import with_known as with_known
from ..candidates.candidate import load_candidate
from ..candidates.preflight import choose_device as choose_device
from ..checks.expect import Disagreement
from ..laws.all_laws import ALL_LAWS
from ..laws.law import Law
from ..reports.report import Report
from ..running.again import try_symptoms_again
from ..running.gpus import check_workers, gpus_of_workers
from ..running.law_names import check_known, check_words, has_words
from ..running.limits import Endings, TimeLimits, check_needs_no_gpu
from ..running.poison import explain_nan, explain_nans
from ..running.trial import find_law, make_case, make_setting, run_law, try_law
from ..running.worker import (
    SECONDS_OF_A_CASE,
    SECONDS_OF_A_LAW,
    Job,
    Worker,
    signatures_on,
)

TryAll = Callable[[list[Law], Job], Iterator[tuple[Law, Result]]]


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
    outside: bool = False,
    seconds_of_a_case: float = SECONDS_OF_A_CASE,
    minutes: float | None = None,
    signatures: int | None = None,
) -> Report:
    """Return the report of an implementation on all laws.

    Args:
        implementation: "reference", "optimized", the dotted name of a package or module that has
            some of the operations under their names, or the path of a .py file.
        only: Optional. Words that the sentence or the area of a law must contain. If None, all
            laws are tried.
        seed: Seed of the drawn cases.
        examples: Number of drawn cases per law.
        device: Optional. The device of the tensors. If None, CUDA if it is available, else the
            CPU. Several workers on "cuda" are distributed over all visible GPUs; those on
            "cuda:1" use the second one.
        known_failures: Optional. Laws that are known to be broken, each with the reason. A known
            failure that holds is reported as a failure. If None, all laws must hold.
        isolated: Whether laws run in worker processes. If False, they run in this process, which
            a crash then ends.
        seconds_of_a_law: Time limit of a law. No case begins after it, and the law is reported
            as not finished, with the number of cases that held.
        on_result: Called with the result of each law, as soon as it is known.
        workers: Number of worker processes. The report depends on it only if laws are not tried.
        outside: Whether the laws are tried on cases outside of the declared support too. Their
            results are in `Report.outside`. They count only if SUPPORT promises to reject such
            cases.
        seconds_of_a_case: An isolated case that takes longer is reported as a hang.
        minutes: Optional. Time limit of all laws, after which laws are not finished. If None,
            there is none.
        signatures: Optional. The number of sets of sizes, dtypes, layouts and options that the
            drawn cases of a law have, so that few kernels are compiled for them. The seed selects
            them. 0 for any number. If None, 4 on a GPU, and any number on a CPU.

    Raises:
        ModuleNotFoundError, ImportError: The implementation does not exist or cannot be imported.
        ValueError: The implementation has none of the operations, no law contains the words, a
            known failure is not the name of a law, a number is out of range, or the device is the
            CPU and the implementation needs a GPU.
    """
    laws = choose_laws(only)
    known = dict(known_failures or {})
    check_known(known)
    if examples < 1:
        raise ValueError(f"examples = {examples}: expected at least 1")
    check_workers(workers)
    if signatures is not None and signatures < 0:
        raise ValueError(f"signatures = {signatures}: expected 0 for any, or more")
    limits = TimeLimits(seconds_of_a_law, seconds_of_a_case, minutes)
    if workers > 1 and not isolated:
        raise ValueError(
            f"workers = {workers} with isolated = False: expected 1, which is this process"
        )
    device = choose_device(device)
    shared = signatures_on(device) if signatures is None else signatures or None
    job = Job("", seed, examples, shared)
    results: dict[str, Result] = {}
    beyond: dict[str, Result] = {}
    count = min(workers, len(laws))
    with _trying(implementation, device, isolated, limits, count) as (
        try_all,
        promises,
    ):
        for law, result in try_all(laws, job):
            results[law.name] = with_known(result, known.get(law.name))
            on_result(results[law.name])
        if outside:
            for law, result in try_all(laws, replace(job, outside=True)):
                beyond[law.name] = result
                on_result(result)
    options = {"seed": seed, "examples": examples}
    in_order = [results[law.name] for law in laws]
    if isolated and any(not result.ok for result in in_order):
        worker = Worker(implementation, device, limits.law, limits.case)
        in_order = try_symptoms_again(worker, in_order, limits.left)
    explained = explain_nans(implementation, device, in_order, limits.left)
    return Report(
        implementation,
        device,
        tuple(explained),
        options,
        tuple(beyond[law.name] for law in laws if law.name in beyond),
        "undeclared" in promises,
    )


def choose_laws(only: str | None) -> list[Law]:
    """Return the laws whose sentence or area contains some words.

    Raises:
        ValueError: No law contains them.
    """
    check_words(only)
    return [law for law in ALL_LAWS if has_words(law.area, law.name, only)]


def reproduce(
    implementation: str,
    law: str,
    case: str,
    device: str | None = None,
    outside: bool = False,
) -> None:
    """Run one law on one case in this process.

    Args:
        implementation: As in `check_implementation`.
        law: The sentence of the law.
        case: The case as Python, as a report shows it.
        device: Optional. The device of the tensors. If None, CUDA if it is available, else the
            CPU.
        outside: Whether calls outside of the declared support are made.

    Raises:
        Disagreement: The law is broken.
        ValueError: No law has this sentence.
    """
    found = find_law(law)
    candidate = load_candidate(implementation)
    candidate = candidate.outside() if outside else candidate
    setting = make_setting(candidate, choose_device(device))
    try:
        run_law(found, setting, make_case(found, case))
    except Disagreement as error:
        cause = explain_nan(found, setting, case) if error.found == "nan" else ""
        if not cause:
            raise
        where = f"{error.where}: {cause}"
        raise Disagreement(error.what, where, error.found, error.right) from None


@contextmanager
def _trying(
    implementation: str,
    device: str,
    isolated: bool,
    limits: TimeLimits,
    workers: int,
) -> Iterator[tuple[TryAll, Collection[str]]]:
    """Provide a function that yields laws with their results, and what SUPPORT promises to reject.

    The function gets the laws, and a job that says how they are tried.
    """
    if not isolated:
        inside = make_setting(load_candidate(implementation), device)
        beyond = replace(inside, candidate=inside.candidate.outside())

        def try_here(laws: list[Law], job: Job) -> Iterator[tuple[Law, Result]]:
            setting = beyond if job.outside else inside
            for law in laws:
                seconds = limits.of_a_law
                yield (
                    law,
                    try_law(
                        law,
                        setting,
                        job.seed,
                        job.examples,
                        seconds=seconds,
                        signatures=job.signatures,
                    ),
                )

        limits.begin()
        yield try_here, inside.candidate.support.rejects or ()
        return
    with ExitStack() as ended:
        free: SimpleQueue[Worker] = SimpleQueue()
        processes = [
            Worker(implementation, device, limits.law, limits.case, gpu=gpu)
            for gpu in gpus_of_workers(device, workers)
        ]
        for worker in processes:
            ended.callback(worker.stop)
            free.put(worker)
        # an import error is raised before any law is tried
        worker.start()
        if device == "cpu":
            check_needs_no_gpu(worker)
        limits.begin()
        for process in processes:
            process.deadline, process.known = limits.deadline, worker.known
        pool = ThreadPoolExecutor(workers)
        ended.callback(pool.shutdown, cancel_futures=True)
        endings = Endings()

        def try_one(law: Law, job: Job) -> Result:
            worker = free.get()
            try:
                if untried := endings.untried(law):
                    return untried
                result = worker.try_law(job, law.area)
                endings.note(law, result, worker.failed_at_once)
                return result
            finally:
                free.put(worker)

        def try_all(laws: list[Law], job: Job) -> Iterator[tuple[Law, Result]]:
            tried = {
                pool.submit(try_one, law, replace(job, law=law.name)): law
                for law in laws
            }
            for future in as_completed(tried):
                yield tried[future], future.result()

        try:
            yield try_all, worker.promises
        except BaseException:
            # the command was interrupted: laws that are being tried end now
            for worker in processes:
                worker.deadline = 0.0
                worker.stop()
            raise


def report_so_far(
    implementation: str,
    device: str,
    laws: Sequence[Law],
    judged: Mapping[str, Result],
    settings: Mapping[str, int],
) -> Report:
    """Return the report of a check that has not judged all laws. The others are not finished.

    Args:
        implementation, device: As in `Report`.
        laws: All laws of the check.
        judged: The results so far, by law.
        settings: Seed and number of examples.
    """
    untried = "the check ended before this law"
    results = [
        judged.get(law.name)
        or Result(law.name, law.area, Status.UNFINISHED, reason=untried)
        for law in laws
    ]
    return Report(implementation, device, tuple(results), settings)
