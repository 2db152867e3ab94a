"""Paged attention and its bookkeeping, written twice: `reference` to read, `optimized` to be fast.

Each part is a package of its own, which the first use imports:

    >>> import pagetwin
    >>> pagetwin.reference.blocks_needed(num_tokens=5, block_size=4)
    2
"""

from importlib import import_module
from types import ModuleType

__version__ = "0.1.0.dev0"

PACKAGES = (
    "conformance",
    "contract",
    "engine",
    "examples",
    "gluon_interpreter",
    "integrations",
    "optimized",
    "recorder",
    "reference",
    "tools",
    "validation",
)
"""The parts. Each is a folder at the top level of a checkout or in its folder `shared`."""


def __getattr__(name: str) -> ModuleType:
    if name in PACKAGES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["__version__", *PACKAGES]
