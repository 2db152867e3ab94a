"""Optional libraries: a missing one is one sentence that names the extra which installs it."""

import importlib.util

EXTRAS = {
    "hypothesis": "conformance",
    "jinja2": "report",
    "matplotlib": "report",
    "sglang": "sglang",
    "transformers": "transformers",
    "vllm": "vllm",
    "xformers": "xformers",
}
"""The extra of pagetwin that installs each library."""


def require(user: str, *libraries: str) -> None:
    """Raise if a library is not installed. Nothing is imported.

    Args:
        user: What needs it, such as "pagetwin check".
        libraries: Names of EXTRAS, all of one extra.

    Raises:
        ImportError: The message names the libraries and the extra.
    """
    missing = [library for library in libraries if is_missing(library)]
    if missing:
        raise ImportError(
            f"{user} needs {' and '.join(missing)}:"
            f" pip install 'pagetwin[{EXTRAS[missing[0]]}]'",
            name=missing[0],
        )


def is_missing(library: str) -> bool:
    """Return whether a library is neither installed nor imported."""
    try:
        return importlib.util.find_spec(library) is None
    except ValueError:  # it was imported from no file
        return False
