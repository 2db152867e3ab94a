"""Interference: a kernel obtains a result from the suite, or changes what the suite uses.

While an operation of a candidate is called, the reference of that operation raises, also through
names that were imported before, and so do the suite's oracles. Reads of the caller's frames and of
the garbage collector's objects are noted. After the call, the functions that compare results,
measure time and compute expected results must be those from before the candidate was imported.
"""

import builtins
import inspect
import logging
import math
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from threading import RLock, get_ident, main_thread
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from ....contract.operations import CONCEPTS, load_implementation
from ...base.judged_call import JUDGED_CALL, expect_no_call
from ...checks.expect import Disagreement
from .copies import LOADS, Copies
from .global_modes import read_modes, restore_modes
from .namespaces import PARTS, Namespaces
from .passed_tensors import PassedTensors

SUITE = __name__.partition(".conformance.")[0]
"""The package: pagetwin."""
ORACLES = (
    "conformance.oracles.brute_force",
    *(
        f"conformance.checks.{name}"
        for name in ("batched", "dense", "group_verdicts", "groups")
    ),
)
"""Modules that compute the results of attention."""
JUDGES = (
    *("conformance.checks.expect", "conformance.candidates.calls.calling"),
    *("conformance.running.screening", *ORACLES),
    *("conformance.cases.options", "contract.budgets"),
)
"""Modules that compute expected results and compare results with them."""
GUARD_VARIABLE = "PAGETWIN_GUARD_CALLS"
"""Environment variable: "0" for adapters that wrap the reference, as tests of the suite do."""
TWINS = ("reference", "optimized", f"{SUITE}.reference", f"{SUITE}.optimized")
"""Implementations that are not guarded."""
SHARED = frozenset(
    name for concept in CONCEPTS if concept.is_single for name in concept.operations
)
"""Operations that both twins share: who imports one has not written it."""
NAMES = frozenset(name for concept in CONCEPTS for name in concept.operations)
ATTENTION = tuple(
    name
    for name in sorted(NAMES)
    if name.endswith("_attention") and not name.startswith("use_")
)
"""Operations whose results the oracles compute."""
KERNELS = (
    *ATTENTION,
    *("concat_and_cache_mla", "gather_cache", "gather_latent_cache"),
    *("merge_attn_states", "reshape_and_cache"),
)
"""Operations whose reference must not be copied. The twins share the code of some others."""
Closed = list[tuple[FunctionType, CodeType, CodeType]]
"""Functions, their code, and the code that they have while a call is judged."""
Watched = tuple[Any, str, Any, CodeType | None]
"""Owner, name, function and its code."""
GUARDED = tuple(
    f"{SUITE}.{name}" for name in ("conformance", "contract", "reference", "validation")
)
"""Packages whose functions must stay as they are."""
COMPARATORS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (time, ("perf_counter", "perf_counter_ns", "monotonic", "time", "process_time")),
    (
        torch,
        (
            *(
                "abs",
                "all",
                "allclose",
                "any",
                "eq",
                "equal",
                "isclose",
                "isnan",
                "max",
            ),
            *("ne", "nan_to_num", "where", "full", "empty"),
        ),
    ),
    (
        torch.Tensor,
        (
            *("__eq__", "__le__", "__ne__", "abs", "all", "any", "argmax", "clone"),
            *("copy_", "cpu", "double", "eq", "equal", "float", "item", "max", "ne"),
            "nan_to_num",
        ),
    ),
    (torch.cuda, ("synchronize", "Event")),
    (math, ("isfinite", "isinf", "isnan", "nan", "inf")),
    (
        builtins,
        (
            *("abs", "all", "any", "bool", "bytes", "divmod", "float", "getattr"),
            *("int", "isinstance", "len", "list", "max", "min", "range", "repr"),
            *("set", "str", "sum", "tuple", "type", "zip"),
        ),
    ),
    (random, ("_urandom",)),
    (random.SystemRandom, ("getrandbits", "random", "sample", "uniform")),
)
"""Functions with which inputs are drawn, results are compared and calls are timed."""
WATCHED = (
    "gc.get_objects",
    "gc.get_referents",
    "gc.get_referrers",
    "sys._current_frames",
    "sys._getframe",
    *("sys.setprofile", "sys.settrace", "sys.monitoring.register_callback"),
)
"""Audit events of functions that reach what the caller holds."""
FRAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")
"""Attributes that are frames, from which those of the caller follow."""
ENDINGS = (f"{SUITE}.conformance.", "hypothesis.", "unittest.", "_pytest.")
"""Packages whose errors end a case without a verdict."""
AS_THEY_WERE = "functions of the suite, of torch and of time as they were"
READERS = (inspect.__file__, traceback.__file__)
"""Files that read frames for the function that calls them. The second one formats errors, too."""
READS = (logging.currentframe.__code__, traceback.walk_tb.__code__)
"""Code that returns frames, in files that also read frames for their own use."""


def found_interference(what: str, right: str) -> Disagreement:
    """Return the error of a law whose candidate interfered.

    Args:
        what: What the candidate did, in words.
        right: What was expected.
    """
    return Disagreement("the call", "as a whole", what, right)


def _modules(prefixes: tuple[str, ...]) -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
    ]


@cache
def _stub(name: str, free: tuple[str, ...]) -> CodeType:
    """Return the code of a function that notes that it was called, and raises."""

    def forbidden(*args: object, **named: object) -> None:
        call: Any = "what is called"
        call()

    own = forbidden.__code__
    consts = tuple(
        note_call if constant == "what is called" else constant
        for constant in own.co_consts
    )
    return own.replace(co_name=name, co_freevars=free, co_consts=consts)


def note_call() -> None:
    """Note a call of the function that calls this one, and raise.

    Raises:
        InterferenceError: Always, inside of a call.
    """
    expect_no_call(sys._getframe(1).f_code.co_name)


class Guard:
    """What the calls of a candidate must not reach, and what they reached."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._closed: Closed = []
        self._is_hooked = False
        self._is_auditing = False
        self._is_off = False
        self._forbidden: dict[str, Closed] = {}
        self._comparators: list[Watched] = []
        self._judges = Namespaces((), SUITE)
        self._others: list[Watched] = []
        self._written: list[object] = []
        self._copies = Copies(is_foreign)

    def start(self) -> None:
        """Remember the functions of the suite, before a candidate is imported."""
        self._is_off = os.environ.get(GUARD_VARIABLE) == "0"
        self._copies.forget()
        if self._comparators or self._is_off:
            return
        import_module(f"{SUITE}.conformance.laws.all_laws")
        for name in JUDGES:
            import_module(f"{SUITE}.{name}")
        self._judges = Namespaces(
            [module for name in JUDGES for module in _modules((f"{SUITE}.{name}",))],
            SUITE,
        )
        self._comparators = list(_comparators())
        self._others = list(_functions_in(_modules(GUARDED)))
        self._know_right()
        self.hook()

    def _know_right(self) -> None:
        """Remember the functions of the reference and of the oracles, to find copies of them."""
        packages = "reference", *ORACLES
        folders = tuple(
            f"{Path(inspect.getfile(import_module(f'{SUITE}.{package}'))).parent}/"
            for package in packages
        )
        oracles = _modules(tuple(f"{SUITE}.{oracle}" for oracle in ORACLES))
        judging = [function for _, _, function, _ in _functions_in(oracles)]
        for name in KERNELS:
            right = [function for function, _, _ in _forbidden_for(name)]
            own = judging if name in ATTENTION else []
            self._copies.know(name, [*right, *own], folders)

    def guards(self, name: str) -> bool:
        """Return whether the calls of an implementation are guarded."""
        return name not in TWINS and not self._is_off

    def hook(self) -> None:
        """Note reads of frames from now on, while a guarded operation is called."""
        if not self._is_hooked:
            sys.addaudithook(self._audit)
            self._is_hooked = True

    @contextmanager
    def around(self, operation: str) -> Iterator[None]:
        """Guard a call of an operation.

        Raises:
            Disagreement: The call reached what it must not reach, or replaced what judges it.
        """
        with self._lock:
            if not JUDGED_CALL.depth:
                JUDGED_CALL.found.clear()
                self._close(operation)
            JUDGED_CALL.depth += 1
        # those of this thread
        modes = read_modes()
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
        left = restore_modes(modes)
        with self._lock:
            JUDGED_CALL.depth -= 1
            if not JUDGED_CALL.depth:
                for function, code, _ in self._closed:
                    function.__code__ = code
                self._closed = []
            found = list(JUDGED_CALL.found)
        if found:
            right = "a result that is computed from the arguments"
            raise found_interference("; ".join(found), right) from failure
        if copied := self._copies.of(operation):
            right = "a kernel that is not the suite's own"
            raise found_interference(f"it loaded a copy of {copied}", right)
        if failure is not None and (name := _ending_of(failure)):
            right = "a result, or an error of its own"
            raise found_interference(f"it raised {name}", right) from failure
        self._expect_judges(self._judges.restore_changed(self._written))
        if left:
            right = "global modes as they were"
            raise found_interference(f"it left {left} changed", right) from failure
        if failure is not None:
            raise failure

    def expect_unchanged(self) -> None:
        """Raise a Disagreement if functions of the suite were replaced."""
        self._expect_judges(self._judges.restore_all())
        _expect_unchanged(self._others)

    def _expect_judges(self, changed: str) -> None:
        """Raise a Disagreement if a name that judges was changed, or a comparator replaced."""
        self._written.clear()
        if changed:
            raise found_interference(f"it replaced {changed}", AS_THEY_WERE)
        _expect_unchanged(self._comparators)

    def _close(self, operation: str) -> None:
        """Let the reference of an operation raise."""
        if operation not in self._forbidden:
            self._forbidden[operation] = list(_forbidden_for(operation))
        self._closed = self._forbidden[operation]
        for function, _, stub in self._closed:
            function.__code__ = stub

    def _audit(self, event: str, args: tuple[object, ...]) -> None:
        if event in LOADS:
            self._copies.note(args[0])
        if not JUDGED_CALL.depth or self._is_auditing:
            return
        if event == "object.__setattr__" and args[1] in PARTS:
            self._written.append(args[0])
        read = args[1] if event == "object.__getattr__" else None
        if event not in WATCHED and read not in FRAMES:
            return
        self._is_auditing = True  # the next line raises such an event, too
        try:
            frame: FrameType | None = sys._getframe(1)
            files = READERS if read is None else READERS[:1]
            while frame is not None and (
                frame.f_code.co_filename in files or frame.f_code in READS
            ):
                frame = frame.f_back
            if frame is not None and is_foreign(frame.f_code.co_filename):
                JUDGED_CALL.note(f"it read {read}" if read else f"it called {event}")
        finally:
            self._is_auditing = False


def _forbidden_for(
    operation: str,
) -> Iterator[tuple[FunctionType, CodeType, CodeType]]:
    """Yield the functions of an operation's reference and of its module, with their codes."""
    right = getattr(load_implementation("reference"), operation, None)
    found: dict[int, FunctionType] = {}
    while isinstance(right, FunctionType):
        found[id(right)] = right
        own = sys.modules[right.__module__]
        helpers = {} if not own.__name__.startswith(f"{SUITE}.reference") else vars(own)
        for name, helper in helpers.items():
            if isinstance(helper, FunctionType) and helper.__module__ == own.__name__:
                found |= {id(helper): helper} if name not in NAMES else {}
        right = getattr(right, "__wrapped__", None)
    for function in found.values():
        code = function.__code__
        yield function, code, _stub(function.__name__, code.co_freevars)


def _ending_of(error: BaseException) -> str:
    """Return the name of an error with which only the suite may end a case, or nothing."""
    if isinstance(error, Disagreement):  # of an adapter that is a part of the suite
        return ""
    for kind in type(error).__mro__:
        if f"{kind.__module__}.".startswith(ENDINGS):
            return kind.__name__
    return ""


@contextmanager
def own_endings() -> Iterator[None]:
    """Let a case end without a verdict only by an error that the suite raises.

    Classes of a candidate are not guarded. So the file is compared where an error was raised.

    Raises:
        Disagreement: The candidate raised it.
    """
    try:
        yield
    except BaseException as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        name = _ending_of(error)
        if name and is_foreign(frame.f_code.co_filename):
            right = "a result, or an error of its own"
            raise found_interference(f"it raised {name}", right) from error
        raise


def _expect_unchanged(watched: list[Watched]) -> None:
    for owner, name, before, code in watched:
        found = getattr(owner, name, None)
        if found is before and (code is None or found.__code__ is code):
            continue
        setattr(owner, name, before)  # also for the clock that limits the search
        if code is not None:
            before.__code__ = code
        shown = f"{getattr(owner, '__name__', owner)}.{name}"
        raise found_interference(f"it replaced {shown}", AS_THEY_WERE)


def _functions_in(modules: Iterable[ModuleType]) -> Iterator[Watched]:
    """Yield the functions that modules hold and that must stay as they are."""
    for module in modules:
        for name, function in list(vars(module).items()):
            if isinstance(function, FunctionType):
                yield module, name, function, function.__code__


def _comparators() -> Iterator[Watched]:
    """Yield the functions with which results are compared and calls are timed."""
    for owner, names in COMPARATORS:
        for name in names:
            function = getattr(owner, name)
            yield owner, name, function, getattr(function, "__code__", None)


def _installed(folder: str) -> bool:
    """Return whether pip has installed packages in a folder (`pip install --target`)."""
    return any(Path(folder).glob("*.dist-info"))


OWN = Path(__file__).resolve().parents[4]
OTHERS = (
    *(
        f"{(OWN / folder).as_posix()}/"
        for folder in ("shared", "reference", "optimized", ".typing")
    ),
    *(
        f"{Path(inspect.getfile(module)).parent.as_posix()}/"
        for module in (inspect, torch)
    ),
    *(f"{Path(folder).as_posix()}/" for folder in sys.path if _installed(folder)),
    "<frozen",
)
"""Folders of this package, of the standard library, of torch, and of installed packages."""


def is_foreign(file: str) -> bool:
    """Return whether a file is neither a part of the package nor an installed one."""
    file = file.replace(os.sep, "/")
    return "-packages/" not in file and not file.startswith(OTHERS)


def expect_no_threads() -> None:
    """Raise a Disagreement if a thread of a candidate runs, which would slow what is timed next.

    Threads of torch and of other installed packages, and idle ones of pools, do not count.
    """
    own = (get_ident(), main_thread().ident)
    for thread, running in sys._current_frames().items():
        frame: FrameType | None = None if thread in own else running
        while frame is not None:
            code = frame.f_code
            if is_foreign(code.co_filename):
                raise found_interference(
                    f"it left a thread running, in {code.co_name}",
                    "no thread that runs on after a call",
                )
            frame = frame.f_back


GUARD = Guard()
"""The guard of this process."""


def guarded(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation whose calls must not reach the suite."""

    @wraps(operation)
    def call(*args: Any, **given: Any) -> Any:
        passed = PassedTensors(args, given)
        with GUARD.around(name):
            found = operation(*args, **given)
        if changed := passed.changed_by(found):
            raise found_interference(changed, "results in the memory that is passed")
        return found

    return call


def guard_operations(operations: dict[str, Any]) -> dict[str, Any]:
    """Return the operations of a candidate, its functions guarded."""
    GUARD.hook()
    right = load_implementation("reference")
    return {
        name: guarded(name, operation)
        if name in NAMES
        and callable(operation)
        and not inspect.isclass(operation)
        and not (name in SHARED and operation is getattr(right, name))
        else operation
        for name, operation in operations.items()
    }
