"""Settings of the SGLang plugin: the environment names the implementation."""

import os

from ...contract.operations import Implementation
from ...validation.integrations import load_for

IMPLEMENTATION_VARIABLE = "PAGETWIN_SGLANG_IMPLEMENTATION"


def load_implementation() -> Implementation:
    """Return the implementation that the environment names: "optimized" if it names none.

    Raises:
        ValueError: it cannot be loaded.
    """
    name = os.environ.get(IMPLEMENTATION_VARIABLE) or "optimized"
    return load_for(IMPLEMENTATION_VARIABLE, name)
