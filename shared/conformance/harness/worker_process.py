"""The loop of a worker process: jobs from standard input, results to a pipe, one JSON per line."""

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from .worker import Job


def main(pipe: int) -> None:
    """Run jobs from standard input until it ends.

    Args:
        pipe: File descriptor to which cases and results are written.
    """
    import faulthandler

    faulthandler.enable()
    with os.fdopen(pipe, "w") as lines:

        def say(**words: Any) -> None:
            lines.write(json.dumps(words) + "\n")
            lines.flush()

        first = json.loads(sys.stdin.readline())
        try:
            from .candidate import load_candidate
            from .screening import screen
            from .trial import make_setting, try_case, try_law

            setting = make_setting(
                load_candidate(first["implementation"]), first["device"]
            )
        except Exception as error:
            say(kind=type(error).__name__, error=str(error))
            return
        import torch

        from ..laws.all_laws import ALL_LAWS

        torch.set_num_threads(1)
        if first["device"] == "cpu" and "triton" in sys.modules:
            from .interpreter import speed_up

            speed_up()
        by_name = {law.name: law for law in ALL_LAWS}
        say(ready=True)
        for line in sys.stdin:
            job = Job(**json.loads(line))
            law = by_name[job.law]

            def at(case: str) -> None:
                say(case=case)

            if job.signature is not None and job.case is None:
                drawn = (job.signature, job.seed, job.examples)
                result = screen(law, setting, *drawn, at)
            elif job.case is None:
                result = try_law(law, setting, job.seed, job.examples, at, job.listed)
            else:
                result = try_case(law, setting, job.case, at)
            say(result=asdict(result) | {"status": result.status.value})
