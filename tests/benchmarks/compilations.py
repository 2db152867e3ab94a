"""Count the kernels that `pagetwin check optimized` compiles for each law, without a GPU.

    PYTHONPATH=tests python tests/benchmarks/compilations.py [--signatures 4] [--only attention]

Launches are recorded instead of made, as in compile_kernels.py, and the reference computes the
results, so that the laws go on. A kernel is compiled once per set of types, constants and
alignments. Classes (layers, operations of several ranks) have no result without their kernels, so
laws about them do not hold here, and are left out. One line of JSON per law: kernels, those of them
that no law before it needed, and cases.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import argparse
import json
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from inspect import isfunction
from typing import Any

from pagetwin.conformance.api.check import choose_laws
from pagetwin.conformance.candidates.candidate import Candidate, Support, load_candidate
from pagetwin.conformance.running.trial import make_setting, try_law
from support.compile_kernels import pretend
from support.warmed_launches import keys_of

CHIP = 90
EXAMPLES = 25


def counted(
    operation: Callable[..., Any],
    truth: Callable[..., Any],
    launches: list[Any],
    kernels: set[str],
) -> Callable[..., Any]:
    """Return an operation that notes what it would compile, and has the reference's result."""

    @wraps(operation)
    def call(*given: Any, **named: Any) -> Any:
        launches.clear()
        with suppress(Exception):  # the reference rejects the same input
            operation(*given, **named)
        kernels.update(keys_of(list(launches)))
        return truth(*given, **named)

    return call


def main() -> None:
    """Print one line per law, and the sum."""
    parser = argparse.ArgumentParser(description="Count compilations per law")
    parser.add_argument("--signatures", type=int, help="of drawn cases; default: any")
    parser.add_argument("--only", help="words of the laws' names or areas")
    asked = parser.parse_args()
    launches: list[Any] = []
    kernels: set[str] = set()
    pretend(CHIP, launches)
    mine, right = load_candidate("optimized"), load_candidate("reference")
    operations = {
        name: counted(operation, right.operations[name], launches, kernels)
        if isfunction(operation)
        else operation
        for name, operation in mine.operations.items()
    }
    setting = make_setting(Candidate("optimized", operations, Support()), "cpu")
    every: set[str] = set()
    total = 0
    for law in choose_laws(asked.only):
        kernels.clear()
        result = try_law(law, setting, 0, EXAMPLES, signatures=asked.signatures)
        if not result.ok:
            continue
        found = {"law": law.name, "kernels": len(kernels), "new": len(kernels - every)}
        print(json.dumps(found | {"cases": result.cases}), flush=True)
        every |= kernels
        total += len(kernels)
    print(json.dumps({"different kernels": len(every), "sum over laws": total}))


if __name__ == "__main__":
    main()
