"""The files of a folder that has one file per attention option."""

from collections.abc import Iterable
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
    names = {module.name for module in iter_modules(folder)}
    if unknown := sorted(names.difference(OPTION_NAMES)):
        raise ImportError(
            f"{package}.{unknown[0]} is not the file of an option: expected the name of a field"
            f" of AttentionOptions, one of {', '.join(OPTION_NAMES)}"
        )
    return {
        name: import_module(f"{package}.{name}")
        for name in OPTION_NAMES
        if name in names
    }
