"""Direct launches: a repeated call gives the driver what Triton would give it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compiler_process import json_lines

SCRIPT = Path(__file__).parents[1] / "support/direct_launches.py"
CASES = (
    "decode",
    "mixed, sinks",
    "batch-invariant",
    "encoder",
    "latent",
    "latent, copied",
    "prefill, FP8",
    "prefill alone",
    "prefill alone, FP8",
    "cascade",
    "cascade, short rests",
    "write",
    "write, FP8",
    "write, FP8, scales in memory",
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that it has a GPU"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return what the script printed, by case."""
    lines = json_lines(SCRIPT, tmp_path_factory.mktemp("driver"))
    return {line["case"]: line for line in lines}


def test_every_case_was_compared(found: dict[str, dict[str, Any]]) -> None:
    assert tuple(found) == CASES


@pytest.mark.parametrize("case", CASES)
def test_a_repeated_call_launches_the_kernels_with_the_arguments_that_triton_gives_them(
    case: str, found: dict[str, dict[str, Any]]
) -> None:
    assert found[case]["is_repeated"] and found[case]["bytes"] > 100
    assert found[case]["as_triton"]


@pytest.mark.parametrize("case", CASES)
def test_addresses_that_are_not_aligned_get_a_kernel_that_is_not_specialized_for_them(
    case: str, found: dict[str, dict[str, Any]]
) -> None:
    """The kept kernel would read 16 bytes at once from an address that is a multiple of 2."""
    assert not found[case]["is_misaligned_repeated"]
    assert found[case]["misaligned_as_triton"]
    assert found[case]["misaligned_kernel_differs"]
