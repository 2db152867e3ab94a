"""Modules and classes generated from a recorded interface, for the stand-ins of engines.

They have signatures, enumerations and dataclass fields, and no behaviour: a constructor keeps its
arguments, and any other method raises.
"""

import abc
import ast
import dataclasses
import enum
import sys
from types import ModuleType
from typing import Any

import torch


def make_module(name: str) -> ModuleType:
    """Return a module of `sys.modules`, made with its parents if it is not there."""
    if name in sys.modules:
        return sys.modules[name]
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = []
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(make_module(parent), last, module)
    return module


def make_class(
    name: str, members: dict[str, Any], classes: dict[str, type], module: str
) -> type:
    """Return a class with the recorded bases, attributes and methods.

    Args:
        name, module: the class.
        members: what was recorded of it (`wheel_interfaces.describe_class`).
        classes: the classes that exist already, by name. Other bases are left out.
    """
    values = {
        key: _value(text)
        for key, text in members["attributes"].items()
        if text is not None
    }
    if {"Enum", "IntEnum"} & set(members["bases"]):
        is_text = "str" in members["bases"]
        # a member whose value was not recorded, or is None, gets its name
        names = [key for key in members["attributes"] if key[0] != "_"]
        pairs = [(key, values.get(key) or key) for key in names]
        made: Any = (
            enum.Enum(name, pairs, type=str) if is_text else enum.Enum(name, pairs)
        )
        for key, method in members["methods"].items():
            if not key.startswith("_"):
                setattr(made, key, _make_method(key, method))
        return made  # type: ignore[no-any-return]
    body: dict[str, Any] = {"__module__": module}
    for key, method in members["methods"].items():
        body[key] = _make_method(key, method)
    if members["is_dataclass"]:
        fields = [
            (key, Any)
            if text in (None, "field()")
            else (key, Any, dataclasses.field(default=values[key]))
            for key, text in members["attributes"].items()
        ]
        if all(key.isidentifier() for key, *_ in fields):
            body.pop("__init__", None)
            has_default = [len(field) == 3 for field in fields]
            return dataclasses.make_dataclass(
                name,
                fields,
                namespace=body,
                # only such a class can have a field without a default after others
                kw_only=has_default != sorted(has_default),
            )
    bases = tuple(classes[base] for base in members["bases"] if base in classes)
    return abc.ABCMeta(name, bases, {**values, **body})


def _value(text: str | None) -> Any:
    """Return the value of a literal, torch's dtypes included; None of anything else."""
    if text is None:
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        found = getattr(torch, text.removeprefix("torch."), None)
        return found if isinstance(found, torch.dtype) else None


def _make_method(name: str, described: dict[str, Any]) -> Any:
    """Return a function with the recorded parameters. A constructor keeps its arguments."""
    texts, names, bare = [], [], False
    for argument, kind, default in described["parameters"]:
        star = {"args": "*", "kwargs": "**"}.get(kind, "")
        if kind == "args":
            bare = True
        if kind == "keyword" and not bare:
            texts.append("*")
            bare = True
        texts.append(
            star + argument + ("" if default is None else f"=_value({default!r})")
        )
        names.append(argument)
    body = f"raise NotImplementedError({name!r})"
    if name == "__init__":
        body = (
            "; ".join(f"self.{argument} = {argument}" for argument in names[1:])
            or "pass"
        )
    elif name == "__post_init__":
        body = "pass"
    elif name == "__new__":
        body = "return object.__new__(cls)"
    space: dict[str, Any] = {"_value": _value, "__name__": "generated"}
    exec(f"def {name}({', '.join(texts)}):\n    {body}", space)
    made: Any = space[name]
    if described.get("abstract"):
        made = abc.abstractmethod(made)
    wrap = {"static": staticmethod, "class": classmethod, "property": property}
    return wrap.get(described["kind"], lambda argument: argument)(made)
