"""Names of the modules and classes that compare results, which must stay as they were.

A verdict also depends on constants, on default arguments, on attributes of classes, and on names
that a module lacks, because a name that is added to it hides a builtin one.
"""

from collections.abc import Iterable, Iterator
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

PARTS = ("__code__", "__defaults__", "__kwdefaults__")
"""Attributes that determine what a function does."""
NO_NAMES = ("__warningregistry__", "__annotations__", "__annotations_cache__")
"""Names that Python adds by itself."""
MISSING = object()


class Namespace:
    """The attributes of a module or of a class.

    Args:
        owner: The module or class.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._before = dict(vars(owner))
        self._values = tuple(self._before.values())

    def is_same(self) -> bool:
        """Return whether all values are the same objects, in the same order."""
        found = vars(self.owner)
        return len(found) == len(self._values) and all(
            map(is_, found.values(), self._values)
        )

    def restore(self) -> str:
        """Restore the attributes, and return the first name that was changed, or nothing."""
        found = dict(vars(self.owner))
        changed = [
            name
            for name, value in self._before.items()
            if found.get(name, MISSING) is not value
        ]
        for name in changed:
            setattr(self.owner, name, self._before[name])
        added = [
            name
            for name, value in found.items()
            if name not in self._before and not self._may_be_added(name, value)
        ]
        for name in added:
            delattr(self.owner, name)
        if changed or added:
            return f"{name_of(self.owner)}.{[*changed, *added][0]}"
        self._before = found  # what Python added by itself, or another order
        self._values = tuple(found.values())
        return ""

    def _may_be_added(self, name: str, value: Any) -> bool:
        is_submodule = isinstance(value, ModuleType) and (
            value.__name__ == f"{name_of(self.owner)}.{name}"
        )
        return name in NO_NAMES or is_submodule


class Function:
    """A function with its code and its default arguments.

    Args:
        function: The function.
        name: Its name in a report.
    """

    def __init__(self, function: FunctionType, name: str) -> None:
        self.function = function
        self.name = name
        self._parts = tuple(getattr(function, part) for part in PARTS)
        self._named: dict[str, Any] = self._parts[2] or {}
        self._before = dict(self._named)
        self._values = tuple(self._named.values())

    @property
    def has_named_defaults(self) -> bool:
        """Whether a dictionary has defaults, which can be changed in place."""
        return bool(self._named)

    def is_same_in_place(self) -> bool:
        """Return whether the dictionary of its defaults has the same objects."""
        found = self._named
        return len(found) == len(self._values) and all(
            map(is_, found.values(), self._values)
        )

    def restore(self) -> str:
        """Restore the function, and return the first part that was changed, or nothing."""
        wrong = [
            name
            for name, before in zip(PARTS, self._parts, strict=True)
            if getattr(self.function, name) is not before
        ]
        if not self.is_same_in_place():
            self._named.clear()
            self._named.update(self._before)
            wrong.append(PARTS[2])
        for name, before in zip(PARTS, self._parts, strict=True):
            if name in wrong:
                setattr(self.function, name, before)
        return f"{self.name}.{wrong[0]}" if wrong else ""


class Namespaces:
    """Modules, their classes, and the functions of both.

    Args:
        modules: The modules.
        package: Name of the package whose classes and functions are compared.
    """

    def __init__(self, modules: Iterable[ModuleType], package: str) -> None:
        owners: dict[int, Any] = {}
        for module in modules:
            owners[id(module)] = module
            for value in vars(module).values():
                if isinstance(value, type) and _is_of(value, package):
                    owners[id(value)] = value
        self._namespaces = [Namespace(owner) for owner in owners.values()]
        self._functions = {
            id(function): Function(function, f"{name_of(owner)}.{name}")
            for owner in owners.values()
            for name, value in list(vars(owner).items())
            for function in _functions_in(value)
            if _is_of(function, package)
        }
        self._with_named = [
            function
            for function in self._functions.values()
            if function.has_named_defaults
        ]

    def restore_changed(self, written: Iterable[object] = ()) -> str:
        """Restore what can be compared in microseconds, and return what was changed, or nothing.

        Args:
            written: Functions of which a part was set.
        """
        for namespace in self._namespaces:
            if not namespace.is_same() and (name := namespace.restore()):
                return name
        for one in self._with_named:
            if not one.is_same_in_place():
                return one.restore()
        for function in written:
            known = self._functions.get(id(function))
            if known is not None and (name := known.restore()):
                return name
        return ""

    def restore_all(self) -> str:
        """Restore all parts, and return the first one that was changed, or nothing."""
        for namespace in self._namespaces:
            if name := namespace.restore():
                return name
        for function in self._functions.values():
            if name := function.restore():
                return name
        return ""


def name_of(owner: Any) -> str:
    """Return the name of a module, or that of a class with its module."""
    if isinstance(owner, ModuleType):
        return owner.__name__
    return f"{owner.__module__}.{owner.__qualname__}"


def _is_of(value: Any, package: str) -> bool:
    module = getattr(value, "__module__", None) or ""
    return module == package or module.startswith(f"{package}.")


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the functions that an attribute calls: its own, a property's, a wrapped one."""
    found = [value]
    if isinstance(value, property):
        found = [value.fget, value.fset]
    elif isinstance(value, (staticmethod, classmethod)):
        found = [value.__func__]
    for function in found:
        while function is not None and not isinstance(function, type):
            if isinstance(function, FunctionType):
                yield function
            function = (
                vars(function).get("__wrapped__")
                if hasattr(function, "__dict__")
                else None
            )
