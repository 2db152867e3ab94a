"""How is a changed twin imported beside the real ones?

The changed file is written to a folder of its own, since Triton reads a kernel from a real file. It
is found before the twin's; all other files are the twin's own, under another name. What they import
from the other packages is not copied: an exception or a metadata class must be the same one.
"""

import importlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from .mutant import ROOT, Mutant

NAME = "mutated"
"""The package in the place of `pagetwin`; there is one in a process."""


class _Alias:
    """Finds and loads `mutated.x` in `pagetwin.x`; it does not find the copied packages."""

    def __init__(self, copied: Sequence[str]) -> None:
        self.copied = tuple(f"{NAME}.{module}." for module in copied)

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if not name.startswith(f"{NAME}.") or f"{name}.".startswith(self.copied):
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        real = importlib.import_module("pagetwin" + spec.name.removeprefix(NAME))
        spec.loader_state = real.__spec__
        return real

    def exec_module(self, module: ModuleType) -> None:
        # the import has given the real module the alias's spec
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


class _Changed:
    """Finds the changed file in the place of the twin's own."""

    def __init__(self, module: str, path: Path, folder: Path | None) -> None:
        self.module = module
        self.path = path
        # a package finds its modules in the twin's own folder
        self.locations = None if folder is None else [str(folder)]

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name != self.module:
            return None
        return spec_from_file_location(
            name, self.path, submodule_search_locations=self.locations
        )


def graft(twin: str, mutant: Mutant | None, folder: Path) -> str:
    """Import a twin with one file changed, and return its dotted name.

    Args:
        twin: "reference" or "optimized".
        mutant: the change. If None, nothing is changed.
        folder: an empty one, for the changed file; it has to stay.
    """
    copied = (twin,)
    sys.dont_write_bytecode = True
    root = ModuleType(NAME)
    root.__path__ = []
    sys.modules[NAME] = root
    sys.meta_path.insert(0, _Alias(copied))  # type: ignore[arg-type]
    if mutant is not None:
        place = folder / f"{mutant.module.rpartition('.')[2]}.py"
        place.write_text(mutant.source(), encoding="utf-8")
        own = ROOT / mutant.file
        changed = _Changed(
            f"{NAME}.{mutant.package}.{mutant.module}",
            place,
            own.parent if own.name == "__init__.py" else None,
        )
        sys.meta_path.insert(0, changed)  # type: ignore[arg-type]
    for package in copied:
        original = importlib.import_module(f"pagetwin.{package}")
        name = f"{NAME}.{package}"
        spec = spec_from_file_location(
            name, original.__file__, submodule_search_locations=list(original.__path__)
        )
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        setattr(root, package, module)
    return f"{NAME}.{twin}"


@contextmanager
def grafted(twin: str, mutant: Mutant | None) -> Iterator[ModuleType]:
    """Import a twin with one file changed, and forget it at the end: another one may follow.

    Args:
        twin: "reference". Kernels of the optimized twin keep the path of a changed file.
        mutant: The change. If None, nothing is changed.
    """
    finders, writes = list(sys.meta_path), sys.dont_write_bytecode
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield sys.modules[graft(twin, mutant, Path(folder))]
        finally:
            sys.meta_path[:] = finders
            sys.dont_write_bytecode = writes
            for name in [*sys.modules]:
                if f"{name}.".startswith(f"{NAME}."):
                    del sys.modules[name]
