"""Launches of Gluon kernels in the interpreter."""

from __future__ import annotations

import importlib.util
import itertools
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from pagetwin.optimized.launch.launcher import Launcher
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import constexpr
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITCallable, JITFunction

from . import asynchronous, language, operations
from .arguments import to_argument
from .assembly import inline_asm_elementwise
from .language import GL, MBARRIER, TL, TMA, Range
from .machine import LOCAL, Machine, Role, Stopped
from .programs import Launch, Program

GL.inline_asm_elementwise = TL.inline_asm_elementwise = inline_asm_elementwise
FUNCTIONS = (JITFunction, InterpretedFunction)
"""Triton's and Gluon's functions; Triton's are of the second class if TRITON_INTERPRET is set."""
FOLDER = ".sm90."
"""In the names of modules with kernels in Gluon, and with the Triton kernels beside them."""
MODULES = {id(gl): GL, id(tl): TL, id(mbarrier): MBARRIER, id(tma): TMA}
BUILTINS = {
    id(ampere.mma_v2): operations.mma_v2,
    id(hopper.fence_async_shared): asynchronous.fence_async_shared,
    id(hopper.warpgroup_mma): asynchronous.warpgroup_mma,
    id(hopper.warpgroup_mma_wait): asynchronous.warpgroup_mma_wait,
}
BY_NAME = {
    "async_load": asynchronous.async_load,
    "async_store": asynchronous.async_store,
    "reinterpret": language.reinterpret,
    "barrier": language.barrier,
    "warp_specialize": language.warp_specialize,
}


def rebind(name: str, value: Any) -> Any:
    """Return what a global of a kernel's module is in the interpreter."""
    value = _changed(value)
    if isinstance(value, constexpr):
        return value.value
    if id(value) in MODULES:
        return MODULES[id(value)]
    if id(value) in BUILTINS:
        return BUILTINS[id(value)]
    if name in BY_NAME and callable(value):
        return BY_NAME[name]
    if isinstance(value, FUNCTIONS):
        return function(value)
    if isinstance(value, type) and getattr(value, "__triton_aggregate__", False):
        return aggregate(value)
    # a constexpr function: triton 3.6 would give it a plain tuple for a NamedTuple
    return value.fn if isinstance(value, JITCallable) else value


CHANGED: dict[str, Any] = {}
"""Modules that take the place of others, by the names of those."""


def _changed(value: Any) -> Any:
    """Return the function or class of this name in a module that takes the place of its own."""
    if isinstance(value, (JITCallable, InterpretedFunction)):
        module, name = value.fn.__module__, value.fn.__name__
    elif isinstance(value, type):
        module, name = value.__module__, value.__name__
    else:
        return value
    return getattr(CHANGED[module], name) if module in CHANGED else value


@contextmanager
def change_module(module: str, path: Path) -> Iterator[None]:
    """Interpret the functions of another file in place of a module's.

    Args:
        module: name of a module with Gluon functions.
        path: the file.
    """
    spec = importlib.util.spec_from_file_location("changed_module", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    made.__package__ = module.rpartition(".")[0]
    spec.loader.exec_module(made)
    _forget_functions()
    CHANGED[module] = made
    try:
        yield
    finally:
        del CHANGED[module]
        _forget_functions()


def _forget_functions() -> None:
    plain_function.cache_clear()
    aggregate.cache_clear()
    MODULE_GLOBALS.clear()


class Globals(dict[str, Any]):
    """The globals of a module, replaced when a function first uses them."""

    def __init__(self, original: Mapping[str, Any]) -> None:
        super().__init__(__builtins__={**vars(__import__("builtins")), "range": Range})
        self._original = original

    def fill(self, names: Sequence[str]) -> None:
        """Take over the names that a function uses."""
        for name in names:
            if name not in self and name in self._original:
                # a function that calls itself finds itself
                self[name] = None
                self[name] = rebind(name, self._original[name])


MODULE_GLOBALS: dict[int, Globals] = {}


def function(kernel: Any) -> Callable[..., Any]:
    """Return the Python function of a Gluon function, which calls others of the interpreter."""
    return plain_function(kernel.fn)


@cache
def plain_function(original: Any) -> Callable[..., Any]:
    """Return a function whose globals are those of the interpreter."""
    replaced = MODULE_GLOBALS.setdefault(
        id(original.__globals__), Globals(original.__globals__)
    )
    replaced.fill(original.__code__.co_names)
    made = types.FunctionType(
        original.__code__,
        replaced,
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    made.__kwdefaults__ = original.__kwdefaults__
    return made


@cache
def aggregate(kind: Any) -> type:
    """Return the class of the interpreter for one that `aggregate` has made."""
    members: dict[str, Any] = {"__init__": plain_function(kind.hash_attrs[0].fn)}
    made = type(kind.__name__, (), members)
    for name, member in vars(kind).items():
        if isinstance(member, JITCallable) and name != "__init__":
            method = _Later(member)
            first = member.fn.__code__.co_varnames[:1]
            setattr(made, name, method if first == ("self",) else staticmethod(method))
    return made


class _Later:
    """A method, whose globals are replaced when it is first called."""

    def __init__(self, member: Any) -> None:
        self._member = member

    def __get__(self, instance: Any, owner: Any) -> Any:
        return types.MethodType(function(self._member), instance)

    def __call__(self, *args: Any) -> Any:
        return function(self._member)(*args)


class Launches:
    """How launches are run, and how many were.

    Args:
        seed: chooses the order of programs and roles.
        lateness: see `Machine`.
        pause_rate: see `Machine`.
        made: names of the kernels that were launched.
    """

    def __init__(self, seed: int, lateness: float, pause_rate: float) -> None:
        self.chance = random.Random(seed)
        self.lateness, self.pause_rate = lateness, pause_rate
        self.made: list[str] = []
        self.tensors: list[torch.Tensor] = []

    def launch(
        self, kernel: Any, grid: Any, args: Any, options: dict[str, Any]
    ) -> None:
        """Run all programs of a launch, in any order."""
        num_warps = options.pop("num_warps", 4)
        for name in ("num_stages", "warmup", "launch_pdl"):
            options.pop(name, None)
        self.made.append(kernel.__name__)
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        tensors = [
            *self.tensors,
            *(each for each in args if hasattr(each, "untyped_storage")),
        ]
        kinds = kernel.fn.__annotations__
        arguments = [
            given[name]
            if kinds.get(name) is constexpr
            else to_argument(given[name], tensors)
            for name in kernel.arg_names
        ]
        grid = (*grid, 1, 1)[:3]
        programs = list(itertools.product(*map(range, grid)))
        self.chance.shuffle(programs)
        memory = Launch(len(programs))
        for number, program in enumerate(programs):
            machine = Machine(
                program,
                grid,
                self.chance,
                self.lateness,
                self.pause_rate,
                Program(memory, number),
            )
            LOCAL.role = Role(machine, 0, num_warps)
            machine.roles = [LOCAL.role]
            try:
                function(_changed(kernel))(*arguments)
                machine.finish()
            except Stopped:
                assert machine.error is not None
                raise machine.error from None
            finally:
                LOCAL.role = None


@contextmanager
def interpret_gluon(
    seed: int = 0, lateness: float = 0.5, pause_rate: float = 0.05
) -> Iterator[Launches]:
    """Run Gluon kernels, and Triton kernels beside them, on host tensors in this context.

    Args:
        seed: chooses the order of programs, roles and asynchronous work.
        lateness: 0 does asynchronous copies at once, 1 as late as possible.
        pause_rate: how likely a role stops where it need not wait.
    """
    launches = Launches(seed, lateness, pause_rate)
    run, call = GluonJITFunction.run, Launcher.__call__
    run_triton = InterpretedFunction.run

    def launch(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
        launches.launch(kernel, grid, args, options)

    def launch_triton(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
        is_beside = FOLDER in kernel.fn.__module__
        (launch if is_beside else run_triton)(kernel, *args, grid=grid, **options)

    def note_tensors(
        launcher: Launcher, grid: Any, pointers: Any, options: Any, numbers: Any, tensors: Any,
        *rest: Any,
    ) -> None:  # fmt: skip
        launches.tensors = [each for each in tensors if isinstance(each, torch.Tensor)]
        call(launcher, grid, pointers, options, numbers, tensors, *rest)

    GluonJITFunction.run = launch
    InterpretedFunction.run = launch_triton
    Launcher.__call__ = note_tensors  # type: ignore[assignment,method-assign]
    try:
        yield launches
    finally:
        GluonJITFunction.run = run
        InterpretedFunction.run = run_triton
        Launcher.__call__ = call  # type: ignore[method-assign]
