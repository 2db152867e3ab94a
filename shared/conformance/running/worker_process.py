"""The loop of a worker process: jobs from standard input, results on its output, one JSON per line.

After a fatal error the process ends by itself, because it could not judge anything else.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from .worker import FATAL, Job

if TYPE_CHECKING:
    from ..base.results import Result
    from ..candidates.setting import Setting


def main(write: Callable[[str], None]) -> None:
    """Run jobs from standard input until it ends.

    Args:
        write: Says a line: cases and results.
    """
    import faulthandler

    faulthandler.enable()

    def say(**words: Any) -> None:
        write(json.dumps(words))

    first = json.loads(sys.stdin.readline())
    try:
        from ..candidates.candidate import load_candidate
        from .screening import screen
        from .trial import make_setting, result_without_cases, try_case, try_law

        candidate = load_candidate(first["implementation"])
        setting = make_setting(candidate, first["device"])
        if why := candidate.support.why_not_device(setting.device):
            raise ValueError(f"{candidate.name} does not support {why}")
    except Exception as error:
        say(kind=type(error).__name__, error=str(error))
        return
    import torch

    from ..base.support import Support
    from ..candidates.fatal import is_context_lost
    from ..laws.all_laws import ALL_LAWS

    torch.set_num_threads(1)
    if first["device"] == "cpu" and "triton" in sys.modules:
        from ...engine.triton_versions import repair_loaded_interpreter
        from .interpreter import speed_up

        # this imports the interpreter, which kernels that are defined later use
        speed_up()
        repair_loaded_interpreter()
    by_name = {law.name: law for law in ALL_LAWS}
    known = (result_without_cases(law, setting.candidate) for law in ALL_LAWS)
    say(
        promises=list(candidate.support.rejects or ()),
        needs={law.name: law.needs for law in ALL_LAWS},
        known=[
            asdict(result) | {"status": result.status.value}
            for result in known
            if result
        ],
    )
    for line in sys.stdin:
        job = Job(**json.loads(line))
        law = by_name[job.law]
        seconds = math.inf if job.seconds is None else job.seconds

        def at(case: str, held: int) -> None:
            say(case=case, calls=setting.candidate.calls, held=held)

        def fail(failure: "Result") -> None:
            say(failure=asdict(failure) | {"status": failure.status.value})

        own = setting
        if job.outside:
            own = replace(setting, candidate=setting.candidate.outside())
        if job.probe is not None:
            probed = setting.candidate.with_support(Support(**job.probe))
            own = replace(setting, candidate=probed)
        if job.signature is not None and job.case is None:
            drawn = (job.signature, job.seed, job.examples)
            waits = job.waits_for_each
            result = screen(law, own, *drawn, at, seconds, waits, fail)
        elif job.case is None:
            result = try_law(
                law,
                own,
                job.seed,
                job.examples,
                at,
                job.listed,
                seconds,
                fail,
                job.signatures,
            )
        else:
            is_exact = job.is_measured or job.probe is not None
            left = seconds if job.makes_smaller else 0.0
            result = try_case(law, own, job.case, at, is_exact, left, fail)
        if job.is_measured and job.case is not None:
            result = measured(result, own, job.case)
        is_last = result.status in FATAL or (
            not result.ok and is_context_lost(setting.device)
        )
        say(
            result=asdict(result) | {"status": result.status.value},
            is_last=is_last,
            calls=setting.candidate.calls,
        )
        if is_last:
            # an orderly end would raise once more, or wait for a kernel
            os._exit(0)


def measured(result: "Result", setting: "Setting", case: str) -> "Result":
    """Return the result of a workload with the errors and the latency of the solution.

    A workload whose outputs could not be compared is returned as it is.
    """
    if result.message or result.status in FATAL:
        return result
    from ..base.results import Status
    from ..candidates.file_formats import find_format
    from .trial import find_law, make_case, with_failure

    law = find_law(result.law)
    operation = setting.candidate.operations[law.needs[0]]
    plan = make_case(law, case)
    own = find_format(setting.candidate.name)
    assert own is not None, "only files of a registered format are measured"
    numbers = own.measure(operation, plan, setting.device)
    if result.ok:
        try:
            numbers |= own.time_calls(operation, plan, setting.device)
        except Exception as error:
            result = with_failure(replace(result, status=Status.BROKEN), case, error)
    return replace(result, details=result.details | {"measured": numbers})
