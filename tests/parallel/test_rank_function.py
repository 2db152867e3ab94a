"""A parallel implementation that is one function per rank, held to the laws of the step."""

from pathlib import Path

import pytest
import torch
from pagetwin.conformance import Status, check_implementation
from rank_functions import FUNCTION, RIGHT, WRONG

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="runs once, on a machine without a GPU"
    ),
]

WHOLE = "all ranks together compute attention over the whole sequences"
CROSS = "tokens of a batch that is not causal attend to all keys"
HELD = {
    WHOLE,
    CROSS,
    "each new token is written to one slot of one rank",
    "invalid parallel steps are rejected",
    "ranks that do not agree on the step are rejected",
}
OUTSIDE = {
    "fixed splits give the same bits on any number of ranks",
    "padding of a parallel step gets zeros and no sink",
}


def check(folder: Path, words: dict[str, str], only: str) -> dict[str, Status]:
    """Return how laws end on a function in a file."""
    text = FUNCTION
    for name, word in words.items():
        text = text.replace(f"{{{name}}}", word)
    # a module of its own for each test
    file = folder / f"{folder.name.replace('-', '_')}.py"
    file.write_text(text, encoding="utf-8")
    report = check_implementation(
        str(file), only, examples=8, device="cpu", isolated=False
    )
    return {result.law: result.status for result in report.results}


def test_a_function_per_rank_is_held_to_the_laws_of_the_parallel_step(
    tmp_path: Path,
) -> None:
    found = check(tmp_path, RIGHT, "parallel_step")
    print(found)
    assert {law for law, status in found.items() if status is Status.HELD} >= HELD
    for law in OUTSIDE & found.keys():
        assert found[law] in (Status.OUTSIDE, Status.MISSING), (law, found[law])
    assert Status.BROKEN not in found.values(), found


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_function_per_rank_breaks_a_law(what: str, tmp_path: Path) -> None:
    assert check(tmp_path, WRONG[what], WHOLE)[WHOLE] is Status.BROKEN
