"""Errors of ranks of vLLM."""

from collections.abc import Callable
from typing import Any

import pytest
from pagetwin.engine.rank_group import RankGroup
from support.fake_vllm import FakeGroup, fake_vllm


def inside(
    ranks: RankGroup,
    version: str,
    work: Callable[[FakeGroup], Any],
    implementation: str = "optimized",
    run: int = 1,
) -> Any:
    """Return what a rank finds inside a stand-in."""
    group = FakeGroup(ranks.group, ranks.world_size, ranks.rank, run)
    with pytest.MonkeyPatch.context() as patch, fake_vllm(version, group=group):
        patch.setenv("PAGETWIN_VLLM_IMPLEMENTATION", implementation)
        return work(group)


def errors(found: list[Any]) -> list[float]:
    """Return the errors of all ranks; raise if a rank has raised."""
    for of_rank in found:
        if isinstance(of_rank, Exception):
            raise of_rank
    return [error for of_rank in found for error in of_rank]
