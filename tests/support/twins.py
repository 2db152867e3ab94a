"""Both twins with the shapes and dtypes of their annotations enforced."""

from collections.abc import Callable
from importlib import import_module
from inspect import isclass, isfunction
from typing import Any

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped
from pagetwin.contract.operations import CONCEPTS

WITHOUT_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs the kernels on CPU tensors"
)
"""Marks a test that tries the run without a GPU."""


def enforced(operation: Any) -> Any:
    """Return an operation that holds its annotations; of a class, each public method does."""
    if not isclass(operation):
        return jaxtyped(operation, typechecker=beartype)
    methods = {
        name: jaxtyped(method, typechecker=beartype)
        for name, method in vars(operation).items()
        if isfunction(method) and (name == "__init__" or name[0] != "_")
    }
    return type(operation.__name__, (operation,), methods)


class Twin:
    """Every public operation of one twin, as an attribute, with its annotations enforced.

    Args:
        name: "reference" or "optimized".
        enforce: whether shapes and dtypes are held against the annotations. A test of a rejection
            wants to see the operation's own error, and so goes to `raw`.
    """

    def __init__(self, name: str, enforce: bool = True) -> None:
        self.name = name
        self._enforce = enforce
        self._operations: dict[str, Callable[..., Any]] = {}
        self.raw = Twin(name, enforce=False) if enforce else self

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        if operation in self._operations:
            return self._operations[operation]
        for concept in CONCEPTS:
            if operation in concept.operations:
                function = getattr(import_module(f"pagetwin.{self.name}"), operation)
                if self._enforce:
                    function = enforced(function)
                self._operations[operation] = function
                return function
        raise AttributeError(f"{operation!r} is not one of pagetwin's operations")

    def __repr__(self) -> str:
        return self.name


TWINS = {name: Twin(name) for name in ("reference", "optimized")}
