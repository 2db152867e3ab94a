"""Implementations whose annotated shapes and dtypes are checked at every call.

`annotated_reference` and `annotated_optimized` hold the operations of the twins wrapped in
`annotated`, so that the laws run on them as on any other implementation.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import isclass, isfunction
from typing import Any

from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped
from pagetwin.contract.operations import find_backends, find_operations

UNCHECKED = (
    "build_attn_metadata",
    "init_kv_cache",
    "is_block_tables_empty",
    "reshape_kv_caches",
)
"""Operations that the laws call with simple classes in place of an engine's builders and backends,
which their annotations name."""


def annotated(operation: Any) -> Any:
    """Return an operation that checks its annotations; of a class, each public method does."""
    if not isclass(operation):
        return _annotated_function(operation)
    methods = {
        name: _annotated_function(method)
        for name, method in vars(operation).items()
        if isfunction(method) and (name == "__init__" or name[0] != "_")
    }
    return type(operation.__name__, (operation,), methods)


def _annotated_function(function: Callable[..., Any]) -> Callable[..., Any]:
    checked = jaxtyped(function, typechecker=beartype)

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return checked(*args, **named)
        except TypeCheckError as error:
            # an input that the operation itself rejects raises the operation's error
            function(*args, **named)
            raise AssertionError(f"{function.__name__}: {error}") from error

    return call


def annotated_twin(name: str) -> dict[str, Any]:
    """Return the annotated operations of a twin by name, and its backends as they are."""
    top = import_module(f"pagetwin.{name}")
    operations = {
        operation: found if operation in UNCHECKED else annotated(found)
        for operation, found in find_operations(top).items()
    }
    return operations | {"BACKENDS": find_backends(top)}
