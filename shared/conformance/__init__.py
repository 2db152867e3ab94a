"""Conformance suite: laws that every attention implementation must satisfy, and their runner.

The suite applies the comparison of the twins to any other implementation. A law is a sentence with
the cases on which it is tried. For every broken law the report shows the smallest failing input
that was found, the found and the expected value at the element with the largest error, and a
program that reproduces the failure. The suite needs no GPU and shares no code with the
implementations that it checks.

    >>> from pagetwin.conformance import check_implementation
    >>> report = check_implementation("my_kernels")  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..contract.extras import require

if TYPE_CHECKING:
    from .harness.families import flash_attention_like as flash_attention_like
    from .harness.families import flashinfer_like as flashinfer_like
    from .harness.families import vllm_like as vllm_like
    from .harness.fuzz import fuzz_implementation as fuzz_implementation
    from .harness.pytest_support import parametrize_with_laws as parametrize_with_laws
    from .harness.rank_function import RankStep as RankStep
    from .harness.rank_function import step_of_ranks as step_of_ranks
    from .harness.report import Report as Report
    from .harness.report import Result as Result
    from .harness.report import Status as Status
    from .harness.runner import check_implementation as check_implementation
    from .harness.runner import reproduce as reproduce
    from .harness.support import Support as Support

_MODULES = {
    "Support": "support",
    "flash_attention_like": "families",
    "flashinfer_like": "families",
    "vllm_like": "families",
    "fuzz_implementation": "fuzz",
    "parametrize_with_laws": "pytest_support",
    "RankStep": "rank_function",
    "step_of_ranks": "rank_function",
    "Report": "report",
    "Result": "report",
    "Status": "report",
    "check_implementation": "runner",
    "reproduce": "runner",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is used: an adapter needs `Support` and not all laws."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _MODULES[name] not in ("families", "support"):
        require(f"pagetwin.conformance.{name}", "hypothesis")
    module = import_module(f"{__name__}.harness.{_MODULES[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
