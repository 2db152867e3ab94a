"""`import flash_attn` finds pagetwin's functions, where the original is not installed."""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ...validation.integrations import load_named
from . import padding
from .calls import FlashAttention

API_VERSION = "2.8.3"
"""The version of flash-attn whose arguments the functions have."""
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
MODULES = (
    "flash_attn",
    "flash_attn.flash_attn_interface",
    "flash_attn.bert_padding",
    "flash_attn_interface",
)
"""What programs import: the names of the second and of the third version."""
THIRD = "flash_attn_interface"
"""The module of the third version, whose functions have another order of arguments."""
BY_POSITION = {
    "flash_attn_func": 3,
    "flash_attn_varlen_func": 7,
    "flash_attn_with_kvcache": 5,
}
"""How many arguments come in the same order in both versions."""
MARK = "__pagetwin__"


def install(implementation: str = "optimized") -> None:
    """Let `import flash_attn` and `import flash_attn_interface` find a twin in this process.

    Call it before the program imports them. A second call changes the twin for later imports.

    Args:
        implementation: "reference", "optimized", or the dotted name of a package.

    Raises:
        RuntimeError: The original is installed, or another module has its name. Nothing changes.
        ValueError: The implementation cannot be loaded. Nothing changes.
    """
    load_named(implementation)
    functions = FlashAttention(implementation)
    for name in MODULES:
        if _is_other(name):
            raise RuntimeError(
                f"install(): the module {name} is there already. A program that imports it gets it,"
                " and pagetwin does not take its place."
            )
    made = {name: ModuleType(name, "pagetwin's functions.") for name in MODULES}
    for name, module in made.items():
        module.__spec__ = ModuleSpec(name, None, is_package=name == "flash_attn")
        setattr(module, MARK, implementation)
        if name.endswith("bert_padding"):
            for function in ("index_first_axis", "pad_input", "unpad_input"):
                setattr(module, function, getattr(padding, function))
            continue
        for function in FUNCTIONS:
            found = getattr(functions, function)
            setattr(module, function, third_version(found) if name == THIRD else found)
    package = made["flash_attn"]
    package.__path__ = []
    package.__version__ = f"{API_VERSION}+pagetwin"  # type: ignore[attr-defined]
    for name in MODULES[1:3]:
        setattr(package, name.partition(".")[2], made[name])
    sys.modules.update(made)


def third_version(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as the third version has it: further arguments by name alone.

    There `return_attn_probs` asks for the log-sum-exp.

    Raises:
        TypeError: In a call with more arguments by position than both versions order alike.
    """
    name = function.__name__
    count = BY_POSITION[name]
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(kind=parameter.KEYWORD_ONLY)
        if place >= count and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        else parameter
        for place, parameter in enumerate(signature.parameters.values())
    ]

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if len(given) > count:
            raise TypeError(
                f"{name} takes {count} arguments by position, because versions of flash-attn have"
                " different orders after them: give the others by name"
            )
        if named.pop("return_attn_probs", False):
            named["return_softmax_lse"] = True
        return function(*given, **named)

    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


def uninstall() -> None:
    """Remove what `install` added. Without it, nothing happens."""
    for name in MODULES:
        if hasattr(sys.modules.get(name), MARK):
            del sys.modules[name]


def _is_other(name: str) -> bool:
    """Return whether a module of that name exists that `install` did not make."""
    if name in sys.modules:
        return not hasattr(sys.modules[name], MARK)
    parent = name.partition(".")[0]
    if parent != name:
        return False
    return find_spec(name) is not None
