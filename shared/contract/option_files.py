"""The files of a folder that has one file per attention option, or per cache format."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from .attention_options import OPTION_NAMES


def import_option_files(package: str, folder: Iterable[str]) -> dict[str, ModuleType]:
    """Return the modules of a package by option, in the order of `AttentionOptions`.

    Args:
        package: Name of the package, its `__name__`.
        folder: Its `__path__`.

    Raises:
        ImportError: A file does not have the name of an option.
    """
    what = "an option: expected the name of a field of AttentionOptions"
    return import_files(package, folder, OPTION_NAMES, what)


def import_files(
    package: str, folder: Iterable[str], names: Sequence[str], what: str
) -> dict[str, ModuleType]:
    """Return the modules of a package by name, in the order of the names that files may have.

    Args:
        what: What a file is of, and what is expected, in words.
    """
    present = {module.name for module in iter_modules(folder)}
    if unknown := sorted(present.difference(names)):
        raise ImportError(
            f"{package}.{unknown[0]} is not the file of {what}, one of {', '.join(names)}"
        )
    return {
        name: import_module(f"{package}.{name}") for name in names if name in present
    }
