"""Screening: hundreds of batches of one signature, judged together by the batched oracle.

The kernels run call by call; the oracle computes a group of calls at once. A batch that is wrong is
tried again by its law, alone, which is the judgement of record and makes the input smaller.

On a GPU nothing waits for a call before the operations of the oracle on its group have been
launched too. If the process then crashes or hangs, the worker tries the same batches again in a
fresh process that waits for each call, so that the batch is found (`worker.py`).
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..base.results import Result, Status, unfinished
from ..candidates.calls.calling import Result as Output
from ..candidates.calls.rank_calls import run_signed
from ..candidates.candidate import OutsideSupport
from ..candidates.fatal import is_context_lost, message_of
from ..candidates.fitting import fit_case, fit_signature
from ..candidates.setting import Setting
from ..cases.option_pairs import PLAIN
from ..cases.rank_signatures import draw_rank_batch, draw_rank_signature
from ..cases.ranks import GATHER, RING, STEP
from ..cases.signatures import (
    LARGE,
    SMALL,
    Signature,
    SignedBatch,
    draw_batch,
    draw_signature,
)
from ..cases.signed_calls import SignedCall, build_signed
from ..checks.group_verdicts import shares_of_group
from ..checks.groups import make_group
from ..laws.law import Law
from .trial import At, OnFailure, ignore, no_one, try_case

CALLS_AT_ONCE = 64
"""Calls of a group, at most. The host waits for the device once per group."""
MOST_RESERVED = 2 << 30
"""Bytes that torch's allocator keeps from one job to the next. A dozen processes share a GPU, and
each signature needs blocks of other sizes."""
MARGIN = 2.0
"""Error budgets by which a batch must be wrong to be reported if its law holds when it is tried
again. Below that, the rounding of the two oracles makes the difference."""


class ContextLostError(RuntimeError):
    """A kernel has ended the CUDA context: no later call of this process can be judged.

    Args:
        case: The case, as Python.
        error: What the call raised.
    """

    def __init__(self, case: str, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}".split("\n")[0][:500])
        self.case = case


def release_memory(device: torch.device) -> None:
    """Return what torch's allocator keeps to the device, if it is much."""
    if device.type == "cuda" and torch.cuda.memory_reserved() > MOST_RESERVED:
        torch.cuda.empty_cache()


def wait_for_kernels(device: torch.device) -> None:
    """Return when all kernels have ended; an error of one of them is raised."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def signature_of(law: Law, setting: Setting, seed: int) -> Signature:
    """Return the signature of a seed, within the declared support."""
    limits = SMALL if setting.device.type == "cpu" else LARGE
    if law.needs[0] in (STEP, GATHER, RING):
        # what ranks take is not declared: a call outside of it is skipped
        return draw_rank_signature(seed, limits, law.needs[0])
    drawn = draw_signature(seed, limits, law.needs[0])
    if setting.candidate.promises_all:
        return drawn
    return fit_signature(drawn, setting.candidate.support)


def screen(
    law: Law,
    setting: Setting,
    seed: int,
    first: int,
    count: int,
    at: At = no_one,
    seconds: float = math.inf,
    waits_for_each: bool = False,
    on_failure: OnFailure = ignore,
) -> Result:
    """Return the result of a law on some batches of one signature.

    Args:
        law: One of the laws of signatures.
        setting: The candidate, the reference and the device.
        seed: Seed of the signature.
        first, count: Index of the first batch, and number of batches.
        at: Called before each case.
        seconds: Time limit. No batch begins after it, except the first one. The law is then not
            finished, unless a batch failed.
        waits_for_each: Whether the kernels of each call are waited for. If not, those of a group
            are, and a crash names the last batch of the group.
        on_failure: Called with a failure before its batch is made smaller.
    """
    if missing := setting.candidate.missing(law.needs):
        reason = f"{setting.candidate.name} has no {', '.join(missing)}"
        declared = setting.candidate.support.operations
        is_declared = declared is None or set(missing) & set(declared)
        status = Status.MISSING if is_declared else Status.OUTSIDE
        return Result(law.name, law.area, status, reason=reason)
    begin = time.perf_counter()
    signature = signature_of(law, setting, seed)
    tally = Tally()

    def counted(result: Result) -> Result:
        """Return a result with everything that was tried."""
        return replace(
            result,
            cases=tally.cases,
            skipped=tally.skipped,
            seconds=round(time.perf_counter() - begin, 3),
            details=result.details | tally.details(signature),
        )

    def judge(group: list[Any]) -> Result | None:
        left = begin + seconds - time.perf_counter()
        judged = partial(
            try_case,
            at=at,
            seconds=left,
            on_failure=lambda failure: on_failure(counted(failure)),
        )
        return _judge(law, setting, group, judged, tally)

    failed: Result | None = None
    last = ""

    def begin_case(case: str, held: int) -> None:
        nonlocal last
        last = case
        at(case, held)

    release_memory(setting.device)
    batches = _until(begin + seconds, signature, first, count)
    try:
        for group in _groups(batches, setting, begin_case, tally, waits_for_each):
            failed = judge(group)
            if failed is not None:
                break
    except ContextLostError as lost:
        failed = Result(
            law.name, law.area, Status.CRASHED, case=lost.case, message=str(lost)
        )
    except torch.OutOfMemoryError as error:
        # of the candidate, of the batch or of the oracle
        status, message = Status.OUT_OF_MEMORY, message_of(error)
        failed = Result(law.name, law.area, status, case=last, message=message)
    if failed is not None:
        return counted(failed)
    result = Result(law.name, law.area, Status.HELD)
    if tally.cases and tally.cases == tally.skipped:
        result = replace(result, status=Status.OUTSIDE)
    result = counted(replace(result, reason="; ".join(sorted(tally.outside)[:3])))
    return unfinished(result) if tally.cases < count else result


def _until(
    end: float, signature: Signature, first: int, count: int
) -> Iterator[SignedBatch]:
    """Yield batches of a signature; from the second one on, only until the time is over."""
    for number in range(count):
        if number and time.perf_counter() > end:
            return
        draw = draw_batch if signature.ranks is None else draw_rank_batch
        yield draw(signature, first + number)


def describe(signature: Signature) -> dict[str, str]:
    """Return the sizes and the options of a signature that are not plain, by name."""
    always = (
        "operation",
        "batch",
        "dtype",
        "head_size",
        "group",
        "block_size",
        "layout",
    )
    choice = signature.choice
    found = {name: choice[name] for name in always}
    found["kv_heads"] = str(signature.kv_heads)
    found |= {
        name: value
        for name, value in choice.items()
        if name not in found and value != PLAIN[name]
    }
    found |= {f"{name} strides": form for name, form in signature.views.given.items()}
    return found if signature.ranks is None else found | signature.ranks.describe()


class Tally:
    """What was tried: cases, those that tested nothing, contents of the batches, seconds."""

    def __init__(self) -> None:
        self.cases = 0
        self.held = 0
        self.skipped = 0
        self.outside: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, batch: SignedBatch) -> None:
        """Count what a batch contains."""
        self.counts += Counter(
            {
                "requests": len(batch.query_lens),
                "new tokens": sum(batch.query_lens),
                "keys": sum(batch.key_lens),
                "needles": sum(needle >= 0 for needle in batch.needles),
                f"table: {batch.table}": 1,
                f"poison: {batch.poison}": 1,
                f"entries: {batch.entries}": 1,
            }
        )
        if (ranks := batch.signature.ranks) is not None and ranks.is_step:
            idle = ranks.idle_ranks(batch.key_lens)
            self.counts += Counter({"ranks without a key of a request": idle})

    def details(self, signature: Signature) -> dict[str, Any]:
        """Return what a result says about the batches of a signature."""
        return {
            "signature": describe(signature),
            "counts": dict(self.counts),
            "seconds": {name: round(spent, 3) for name, spent in self.seconds.items()},
        }


Tried = tuple[SignedBatch, SignedCall, Output]
"""A batch, its call and the candidate's result, or the error that it raised."""


def _groups(
    batches: Iterator[SignedBatch],
    setting: Setting,
    at: At,
    tally: Tally,
    waits_for_each: bool,
) -> Iterator[list[tuple[SignedBatch, SignedCall, Output | Exception]]]:
    """Run batches one after another, and yield them in groups that the oracle computes at once."""
    group: list[Any] = []
    own = setting
    if not waits_for_each:
        own = replace(setting, candidate=setting.candidate.without_waiting())
    for batch in batches:
        shown = batch if setting.candidate.promises_all else _fitted(batch, setting)
        at(repr(shown), tally.held)
        began = time.perf_counter()
        built = build_signed(shown, setting.device)
        ran = time.perf_counter()
        tally.seconds["build"] += ran - began
        tally.cases += 1
        tally.add(shown)
        out: Output | Exception
        try:
            out = run_signed(own, shown, built)
        except OutsideSupport as error:
            tally.skipped += 1
            tally.outside.add(str(error))
            continue
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if is_context_lost(setting.device):
                raise ContextLostError(repr(shown), error) from error
            out = error
        tally.seconds["candidate"] += time.perf_counter() - ran
        group.append((shown, _without_caches(built), out))
        is_full = isinstance(out, Exception) or len(group) == CALLS_AT_ONCE
        if waits_for_each:
            _wait(setting, shown, tally)
        if is_full:
            yield group
            group = []
    if group:
        yield group


def _wait(setting: Setting, last: SignedBatch, tally: Tally) -> None:
    """Wait for all kernels. If one has ended the context, the last batch is named."""
    began = time.perf_counter()
    try:
        wait_for_kernels(setting.device)
    except Exception as error:
        raise ContextLostError(repr(last), error) from error
    tally.seconds["wait"] += time.perf_counter() - began


def _without_caches(built: SignedCall) -> SignedCall:
    """Return a call without the caches, which the oracle does not read."""
    kept = built.call.arguments.items()
    caches = ("key_cache", "value_cache")
    arguments = {name: argument for name, argument in kept if name not in caches}
    return replace(built, call=replace(built.call, arguments=arguments))


def _fitted(batch: SignedBatch, setting: Setting) -> SignedBatch:
    fitted: SignedBatch = fit_case(batch, setting.candidate.support)
    return fitted


def _shares(setting: Setting, ran: Sequence[Tried]) -> Tensor:
    """Return [calls] the largest error of each call of a group divided by its error budget."""
    padded = make_group([built for _, built, _ in ran], setting.device)
    ranks = ran[0][0].signature.ranks
    is_joined = ranks is not None and ranks.is_joined
    return shares_of_group(padded, [out for _, _, out in ran], is_joined)


def _judge(
    law: Law,
    setting: Setting,
    group: list[Any],
    judge_alone: Callable[[Law, Setting, str], Result],
    tally: Tally,
) -> Result | None:
    """Return the failure of the first batch of a group that is wrong, or None if all are right."""
    began = time.perf_counter()
    ran = [member for member in group if not isinstance(member[2], Exception)]
    found = torch.zeros(0)
    if ran:
        try:
            found = _shares(setting, ran)
        except Exception as error:
            # the error of a kernel of the candidate may be raised by any later operation
            if is_context_lost(setting.device):
                raise ContextLostError(repr(group[-1][0]), error) from error
            raise
    tally.seconds["oracle"] += time.perf_counter() - began
    _wait(setting, group[-1][0], tally)
    shares = [float(share) for share in found.tolist()]
    wrong = [
        (batch, share)
        for (batch, _, _), share in zip(ran, shares, strict=True)
        if not share <= 1
    ]
    wrong += [
        (batch, float("inf")) for batch, _, out in group if isinstance(out, Exception)
    ]
    for batch, share in wrong:
        began = time.perf_counter()
        result = judge_alone(law, setting, repr(batch))
        tally.seconds["law"] += time.perf_counter() - began
        if not result.ok:
            return result
        tally.counts["judged again"] += 1
        if share > MARGIN:
            message = (
                f"{share:.3g} of the error budget after the calls before it, and right when it"
                " was tried again: the result depends on earlier calls or on timing"
            )
            return Result(
                law.name, law.area, Status.BROKEN, case=repr(batch), message=message
            )
    tally.held += len(group)
    return None
