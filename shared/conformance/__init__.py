"""How does one find out that a kernel is wrong?

The judge that compares the twins, for kernels of other people: laws, each a sentence with the cases
it is tried on, and a report that shows for every law that is broken the smallest input found, both
answers at the worst place, and how to see it again. It needs no GPU and shares no code with what it
judges.

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
