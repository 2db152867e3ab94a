"""Import of a solution's sources from memory, as one package. No file is written.

Triton reads the source of a kernel through `inspect`, which asks the loader of its module.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import PurePosixPath
from types import ModuleType
from typing import Any

from .solutions import Solution


class _Finder(MetaPathFinder):
    """Finds the modules of the packages of solutions.

    Args:
        texts: The source of each module by its dotted name. Packages are empty modules.
    """

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.files: dict[str, str] = {}

    def add(self, solution: Solution) -> None:
        """Add the modules of a solution."""
        top = solution.package
        self.texts[top], self.files[top] = "", f"{solution.name}/__init__.py"
        for path, text in solution.sources.items():
            if not path.endswith(".py"):
                continue
            *folders, stem = PurePosixPath(path).with_suffix("").parts
            for depth in range(1, len(folders) + 1):
                name = ".".join([top, *folders[:depth]])
                self.texts.setdefault(name, "")
                self.files.setdefault(name, f"{solution.name}/{'/'.join(folders)}")
            parts = [top, *folders, *([] if stem == "__init__" else [stem])]
            self.texts[".".join(parts)] = text
            self.files[".".join(parts)] = f"{solution.name}/{path}"

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of a module of a solution, or None for any other module."""
        if fullname not in self.texts:
            return None
        loader: Loader = _TextLoader(self.files[fullname], self.texts[fullname])
        is_package = any(name.startswith(f"{fullname}.") for name in self.texts)
        return spec_from_loader(fullname, loader, is_package=is_package)


class _TextLoader(SourceLoader):
    """Loads a module from its text.

    Args:
        file: What tracebacks show as its file.
        text: Its source.
    """

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.text = text

    def get_filename(self, fullname: str) -> str:
        """Return what tracebacks show as the file."""
        return self.file

    def get_data(self, path: str | bytes) -> bytes:
        """Return the source."""
        return self.text.encode()


FINDER = _Finder()


def import_entry(solution: Solution) -> Callable[..., Any]:
    """Return the function of a solution.

    Raises:
        ValueError: The file has no such function.
        Exception: What the import of a source raises.
    """
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
    FINDER.add(solution)
    parts = PurePosixPath(solution.entry_file).with_suffix("").parts
    module = importlib.import_module(".".join([solution.package, *parts]))
    entry: Callable[..., Any] | None = getattr(module, solution.entry_name, None)
    if not callable(entry):
        raise ValueError(
            f"{solution.file}: {solution.entry_file} has no function {solution.entry_name}"
        )
    return entry
