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
    from .api.check import check_implementation as check_implementation
    from .api.check import reproduce as reproduce
    from .api.fuzz import fuzz_implementation as fuzz_implementation
    from .api.pytest_support import (
        parametrize_with_laws as parametrize_with_laws,
    )
    from .base.families import flash_attention_like as flash_attention_like
    from .base.families import flashinfer_like as flashinfer_like
    from .base.families import vllm_like as vllm_like
    from .base.flash_attn_functions import FlashAttnFunctions as FlashAttnFunctions
    from .base.results import Result as Result
    from .base.results import Status as Status
    from .base.support import Support as Support
    from .candidates.rank_function import RankStep as RankStep
    from .candidates.rank_function import step_of_ranks as step_of_ranks
    from .reports.report import Report as Report

_MODULES = {
    "Support": "base.support",
    "flash_attention_like": "base.families",
    "flashinfer_like": "base.families",
    "vllm_like": "base.families",
    "FlashAttnFunctions": "base.flash_attn_functions",
    "RankStep": "candidates.rank_function",
    "step_of_ranks": "candidates.rank_function",
    "Report": "reports.report",
    "Result": "base.results",
    "Status": "base.results",
    "check_implementation": "api.check",
    "reproduce": "api.check",
    "fuzz_implementation": "api.fuzz",
    "parametrize_with_laws": "api.pytest_support",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is used: an adapter needs `Support` and not all laws."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _MODULES[name].startswith("base."):
        require(f"pagetwin.conformance.{name}", "hypothesis")
    module = import_module(f"{__name__}.{_MODULES[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
