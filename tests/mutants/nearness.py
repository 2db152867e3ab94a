"""Order of the laws for a mutant: those first whose operations are nearest to the changed file."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from functools import cache

from pagetwin.conformance.laws.law import Law
from pagetwin.contract.operations import CONCEPTS
from support.source_tree import imports, modules

from .mutant import Mutant

SLOW = 5.0
"""A law that takes longer on an unchanged twin is asked after its neighbours."""

BACKENDS = "backends.backend"
"""The file of what no concept names: the backends."""


def laws_near(
    mutant: Mutant,
    laws: Iterable[Law],
    usual: Mapping[str, float],
    first: str = "",
) -> list[Law]:
    """Return the laws that can notice a change, those first whose operations are nearest to it.

    A law whose operations do not import the changed file, directly or not, cannot. Of those that
    are as near the slow ones come last. A law with the words `first` in its name is the first.
    """
    steps = _steps_to(mutant.twin, f"{mutant.package}.{mutant.module}")
    home = {
        name: f"{mutant.twin}.{concept.module}"
        for concept in CONCEPTS
        for name in concept.operations
    }
    backends = f"{mutant.twin}.{BACKENDS}"

    def distance(law: Law) -> float:
        # what no concept has is the backends
        found = [steps.get(home.get(need, backends), math.inf) for need in law.needs]
        # a law that names no operation looks at more than one
        return min(found, default=len(steps))

    def rank(law: Law) -> tuple[bool, float, bool]:
        is_named = bool(first) and first in law.name
        return not is_named, distance(law), usual.get(law.name, 0.0) > SLOW

    return sorted((law for law in laws if distance(law) < math.inf), key=rank)


@cache
def _steps_to(twin: str, module: str) -> dict[str, int]:
    """Return the number of imports between each module of a twin and one module."""
    own = [name for name in modules() if name.split(".")[0] == twin]
    steps, frontier = {module: 0}, deque([module])
    while frontier:
        reached = frontier.popleft()
        for name in own:
            if name not in steps and reached in imports(name):
                steps[name] = steps[reached] + 1
                frontier.append(name)
    return steps
