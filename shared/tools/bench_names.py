"""Names that `pagetwin bench` takes: suites, workloads and implementations.

Nothing here imports torch, so a wrong name is reported at once.
"""

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .arguments import nearest

SUITES = {
    "standard": ("workloads.json",),
    "extended": ("extended.json",),
    "formats": ("formats.json",),
    "sparse": ("sparse.json",),
    "all": ("workloads.json", "extended.json"),
}
"""Files of each suite of workloads."""
IMPLEMENTATIONS = (
    "ours", "fa3", "fa4", "flashinfer", "flashinfer-pod", "cudnn", "vllm", "xformers",
    "torch-flash", "torch-cudnn",
)  # fmt: skip
"""Names of the libraries that every suite can time."""
BEYOND_STANDARD = ("ours-plain", "ours-bf16", "flashmla", "torch-index")
"""Names of those that the standard suite has no workload for."""
SPARSE = (
    "ours", "fa3", "flashmla", "flashmla-fp8", "flashinfer", "vllm", "vllm-decode",
    "vllm-sparse", "vllm-indexer", "torch-flash", "torch-topk", "torch-scores",
)  # fmt: skip
"""Names of the libraries that the suite of sparse attention can time."""


def read_suite(suite: str) -> list[dict[str, Any]]:
    """Return the workloads of a suite as they are stored.

    Raises:
        ValueError: The suite is not one of SUITES.
    """
    if suite not in SUITES:
        raise ValueError(f"suite = {suite!r}: expected {', '.join(SUITES)}")
    found = []
    for name in SUITES[suite]:
        path = Path(__file__).parent / "bench" / name
        stored = json.loads(path.read_text(encoding="utf-8"))
        found += [stored["defaults"] | workload for workload in stored["workloads"]]
    return found


def choose_names(names: Sequence[str], suite: str) -> list[str]:
    """Return the workloads of a suite with these names or patterns, all of them without names.

    Raises:
        ValueError: The suite is unknown, or none of its workloads has one of the names. The
            message lists similar names.
    """
    known = [stored["name"] for stored in read_suite(suite)]
    chosen = set()
    for name in names:
        found = [known_name for known_name in known if fnmatchcase(known_name, name)]
        if not found:
            raise ValueError(
                f"workload = {name!r}: {nearest(name, known)}expected some of"
                f" {', '.join(known)}, or a pattern such as 'decode-*'"
            )
        chosen.update(found)
    return [known_name for known_name in known if not names or known_name in chosen]


def find_implementations(name: str, known: Sequence[str]) -> list[str]:
    """Return the libraries that a name means: "torch" means all of torch's.

    Raises:
        ValueError: No library has the name.
    """
    found = [full for full in known if full == name or full.startswith(f"{name}-")]
    if not found:
        raise ValueError(
            f"implementations = {name!r}: expected some of {', '.join(known)}, torch"
        )
    return found


def known_libraries(suite: str) -> tuple[str, ...]:
    """Return the names of the libraries that a suite can time."""
    if suite == "sparse":
        return SPARSE
    return IMPLEMENTATIONS + (BEYOND_STANDARD if suite != "standard" else ())


def check_names(
    names: Sequence[str],
    suite: str,
    implementations: Sequence[str],
    has_fa3: bool,
    has_flashmla: bool,
) -> None:
    """Raise if a name is unknown, or a library's file would not be used.

    Args:
        names: Names or patterns of workloads.
        suite: The suite.
        implementations: Names of libraries. If empty, all of them.
        has_fa3, has_flashmla: Whether the file of the library is given.

    Raises:
        ValueError: The message says which.
    """
    choose_names(names, suite)
    known = list(known_libraries(suite))
    chosen = set(known if not implementations else ())
    for name in implementations:
        chosen.update(find_implementations(name, known))
    for library, is_given in (("fa3", has_fa3), ("flashmla", has_flashmla)):
        if is_given and library not in chosen:
            where = (
                "--implementations"
                if library in known
                else "--suite extended or all, whose workloads it has"
            )
            raise ValueError(
                f"{library} is not timed, so its file is not used: expected it in {where}"
            )


def check_device(device: str | None, smoke: bool) -> None:
    """Raise if a device cannot be chosen on any machine.

    Args:
        device: Optional. "cuda" or "cpu". If None, torch chooses.
        smoke: Whether the workloads are tiny.
    """
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device = {device!r}: expected cpu or cuda")
    if device == "cpu" and not smoke:
        raise ValueError(
            "device = 'cpu': a benchmark needs a CUDA device, because the times of interpreted"
            " kernels have no meaning; --smoke runs tiny versions of all workloads here, to try"
            " the benchmark itself"
        )
