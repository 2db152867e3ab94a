"""Conformance suite: laws that every attention implementation must satisfy, and their runner.

The suite applies the comparison of the twins to any other implementation. A law is a sentence with
the cases on which it is tried. For every broken law the report shows the smallest failing input
that was found, the found and the expected value at the element with the largest error, and a
program that reproduces the failure. The suite needs no GPU and shares no code with the
implementations that it checks.

    >>> from pagetwin.conformance import check_implementation
    >>> report = check_implementation("my_kernels")  # doctest: +SKIP
"""

from .harness.candidate import Support as Support
from .harness.fuzz import fuzz_implementation as fuzz_implementation
from .harness.pytest_support import parametrize_with_laws as parametrize_with_laws
from .harness.report import Report as Report
from .harness.report import Result as Result
from .harness.report import Status as Status
from .harness.runner import check_implementation as check_implementation
from .harness.runner import reproduce as reproduce
