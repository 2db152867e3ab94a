"""Launches of Gluon kernels in the interpreter."""

from __future__ import annotations

import importlib.util
import inspect
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
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import constexpr
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITCallable, JITFunction

from . import assembly
from .accesses import LOCAL
from .arguments import to_argument
from .language import (
    AMPERE,
    ASYNC_COPY,
    GL,
    HOPPER,
    MBARRIER,
    TL,
    TMA,
    Module,
    Range,
)
from .machine import RoleMachine, Stopped, WarpRole
from .programs import LaunchMemory, Program
from .values import Value

GL.inline_asm_elementwise = TL.inline_asm_elementwise = assembly.inline_asm_elementwise
FUNCTIONS = (JITFunction, InterpretedFunction)
"""Triton's and Gluon's functions; Triton's are of the second class if TRITON_INTERPRET is set."""
MODULES: dict[Any, Module] = {
    gl: GL,
    tl: TL,
    mbarrier: MBARRIER,
    ampere.mbarrier: MBARRIER,
    tma: TMA,
    ampere.async_copy: ASYNC_COPY,
    ampere: AMPERE,
    hopper: HOPPER,
}
OPERATIONS = {
    id(vars(module)[name]): operation
    for module, known in MODULES.items()
    for name, operation in vars(known).items()
    if name in vars(module)
}
"""Operations by the functions in whose place they are; those that a kernel imports by name."""
BY_NAME: dict[str, Any] = {}
"""Operations by the names that the kernels of this context have for them."""


def rebind(name: str, value: Any) -> Any:
    """Return what a global of a kernel's module is in the interpreter."""
    value = _changed(value)
    if isinstance(value, constexpr):
        return value.value
    if isinstance(value, types.ModuleType):
        return MODULES.get(value, value)
    if name in BY_NAME and callable(value):
        return BY_NAME[name]
    if id(value) in OPERATIONS:
        return OPERATIONS[id(value)]
    is_function = isinstance(value, types.FunctionType)
    if is_function and getattr(value, "__triton_builtin__", False):
        return lambda *_, **__: getattr(GL, name)
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


class InterpretedLaunches:
    """How launches are run, and how many were.

    Args:
        seed: chooses the order of programs and roles.
        lateness: see `RoleMachine`.
        pause_rate: see `RoleMachine`.
        reports_unwritten: see `interpret_gluon`.
        made: names of the kernels that were launched.
        tensors: further tensors that descriptors may have addresses of.
        machine: the last program.
    """

    def __init__(
        self, seed: int, lateness: float, pause_rate: float, reports_unwritten: bool
    ) -> None:
        self.chance = random.Random(seed)
        self.lateness, self.pause_rate = lateness, pause_rate
        self.reports_unwritten = reports_unwritten
        self.made: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.machine: RoleMachine | None = None

    def launch(
        self, kernel: Any, grid: Any, args: Any, options: dict[str, Any]
    ) -> None:
        """Run all programs of a launch, in any order."""
        num_warps = options.get("num_warps", 4)
        self.made.append(kernel.__name__)
        given = _bind(kernel, args, options)
        tensors = [
            *self.tensors,
            *(value for value in given.values() if hasattr(value, "untyped_storage")),
        ]
        kinds = kernel.fn.__annotations__
        arguments = [
            rebind(name, given[name])
            if kinds.get(name) is constexpr or kinds.get(name) == "gl.constexpr"
            else to_argument(given[name], tensors)
            for name in kernel.arg_names
        ]
        grid = grid(given) if callable(grid) else grid
        grid = (*(grid if isinstance(grid, (tuple, list)) else (grid,)), 1, 1)[:3]
        programs = list(itertools.product(*map(range, grid)))
        self.chance.shuffle(programs)
        memory = LaunchMemory(len(programs))
        for number, program in enumerate(programs):
            self.machine = machine = RoleMachine(
                program,
                grid,
                self.chance,
                self.lateness,
                self.pause_rate,
                Program(memory, number),
                self.reports_unwritten,
            )
            LOCAL.role = WarpRole(machine, 0, num_warps)
            machine.roles = [LOCAL.role]
            try:
                function(_changed(kernel))(*arguments)
                machine.finish()
            except Stopped:
                assert machine.error is not None
                raise machine.error from None
            finally:
                LOCAL.role = None


def _bind(kernel: Any, args: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a kernel by name, and launch options.

    Raises:
        TypeError: one is missing, or there are too many.
    """
    names = kernel.arg_names
    if len(args) > len(names):
        raise TypeError(
            f"{kernel.__name__} gets {len(args)} arguments: expected at most {len(names)}"
        )
    parameters = inspect.signature(kernel.fn).parameters.values()
    given = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not inspect.Parameter.empty
    }
    given |= dict(zip(names, args, strict=False)) | dict(options)
    missing = [name for name in names if name not in given]
    if missing:
        raise TypeError(f"{kernel.__name__} gets no argument {', '.join(missing)}")
    return given


@contextmanager
def interpret_gluon(
    seed: int = 0,
    lateness: float = 0.5,
    pause_rate: float = 0.05,
    *,
    reports_unwritten: bool = True,
    is_beside: Callable[[Any], bool] = lambda kernel: False,
    names: Mapping[str, Any] | None = None,
    further_assembly: Mapping[str, Callable[[list[Value]], Any]] | None = None,
) -> Iterator[InterpretedLaunches]:
    """Run Gluon kernels, and Triton kernels beside them, on host tensors in this context.

    Args:
        seed: chooses the order of programs, roles and asynchronous work.
        lateness: 0 does asynchronous copies at once, 1 as late as possible.
        pause_rate: how likely a role stops where it need not wait.
        reports_unwritten: whether a read of shared memory that was not written yet is an error.
            If not, it reads NaN.
        is_beside: whether a Triton kernel, which runs in Triton's interpreter otherwise, is run in
            this one too.
        names: Optional. What globals of these names are in all kernels: operations of this package
            for functions of a project that wrap those of Gluon.
        further_assembly: Optional. What inline assembly computes that this package does not know,
            by a pattern that is found in its text.
    """
    launches = InterpretedLaunches(seed, lateness, pause_rate, reports_unwritten)
    run, run_triton = GluonJITFunction.run, InterpretedFunction.run

    def launch(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
        launches.launch(kernel, grid, args, options)

    def launch_triton(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
        (launch if is_beside(kernel) else run_triton)(
            kernel, *args, grid=grid, **options
        )

    before = dict(BY_NAME), dict(assembly.FURTHER)
    BY_NAME.update(names or {})
    assembly.FURTHER.update(further_assembly or {})
    if before[0] != BY_NAME:
        _forget_functions()
    GluonJITFunction.run = launch
    InterpretedFunction.run = launch_triton
    try:
        yield launches
    finally:
        GluonJITFunction.run = run
        InterpretedFunction.run = run_triton
        for table, entries in zip((BY_NAME, assembly.FURTHER), before, strict=True):
            table.clear()
            table.update(entries)
