"""Choices among kernels that tests force, whatever the families estimate."""

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from pagetwin.optimized.dispatch import choice
from pagetwin.optimized.dispatch.choice import AttentionPlan
from pagetwin.optimized.runtime.family import KernelFamily, Task


def no_launch_for_all() -> AbstractContextManager[Any]:
    """Let long requests be prefilled, and short ones beside them be decoded."""
    return mock.patch.object(AttentionPlan, "choose", lambda *_: None)


def one_launch_for_all(division: int = 0) -> AbstractContextManager[Any]:
    """Let one launch compute all requests of every batch with a long one.

    Args:
        division: how the launch divides the work. 0 stands for the largest query tile.
    """

    def choose(plan: AttentionPlan, every: Any, *_: Any) -> Task:
        return Task(division=division or every.row_tiles[-1])

    return mock.patch.object(AttentionPlan, "choose", choose)


def these_families(*families: KernelFamily) -> AbstractContextManager[Any]:
    """Let dispatch know these families alone."""
    return mock.patch.object(choice.families, "FAMILIES", families)
