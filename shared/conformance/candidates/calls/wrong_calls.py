"""Wrong calls: before a law's valid call of an operation, the same call with one wrong argument.

The contract says which of them must raise: the reference is run on the case first, on copies. Then
the candidate gets those calls, with the law's own objects and tensors. After each one they must
hold what they held before, and the law goes on with them.
"""

import copy
import inspect
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from typing import Any

from torch import Tensor

from ....contract.attention_options import AttentionOptions
from ....engine.rank_error import RankError
from ...cases.wrong_values import wrong_values
from ...checks.expect import INPUT_ERRORS, Disagreement
from ...checks.state import state_of
from ..candidate import Candidate, why_outside
from .recorded_calls import Records

COMPUTED = ("given", "numbers", "_causal", "_not_causal")
"""Attributes that hold what options compute once per object."""
EXPLAINED = re.compile(
    "expected|is not a multiple of|has no|; (use|call|move|pass|free)"
)
"""What an error says that is promised: others come from torch or Python."""
MUTABLE = (Tensor, list, tuple, dict)
"""Types of wrong values that a call may change."""
TRIED = (0, 2)
"""Which calls of a method are made with wrong arguments first, of each thread; of a function it is
the first one."""

Key = tuple[int, str, int, str, str]
"""The thread, function, number of the call, argument and words of a wrong value."""


@dataclass(frozen=True)
class CallPart:
    """An argument of a call, or a field of an argument that is a dataclass.

    Args:
        label: Its name. Fields of options have their own names, as functions may take those.
        value: The valid value.
        argument: Name of the argument.
        field: Name of the field; empty if it is the argument itself.
    """

    label: str
    value: Any
    argument: str
    field: str = ""

    def put(self, given: Mapping[str, Any], value: Any) -> dict[str, Any]:
        """Return the arguments with another value here."""
        if self.field:
            value = replace(given[self.argument], **{self.field: value})
        return {**given, self.argument: value}


class WrongCalls(Records):
    """A candidate whose calls are made with wrong arguments first.

    Args:
        candidate: The candidate.
        device: Device of the inputs.
        kinds: Kinds of wrong values, as in `Wrong`.
        promised: Optional. The wrong calls that must raise, with the type of the contract's error.
            If None, the candidate is the contract, and its wrong calls are made on copies.
    """

    def __init__(
        self,
        candidate: Candidate,
        device: Any,
        kinds: Collection[str],
        promised: Mapping[Key, type[Exception]] | None = None,
    ) -> None:
        self.kinds, self.is_contract = kinds, promised is None
        self.promised: dict[Key, type[Exception]] = dict(promised or {})
        self.tried: set[tuple[str, str]] = set()
        """The functions and arguments with which wrong calls were made."""
        self._threads: dict[int, int] = {}
        self._counts: Counter[tuple[int, str]] = Counter()
        self._inside: set[int] = set()
        self._returned: list[Any] = []
        super().__init__(candidate, device)

    def _function(
        self, name: str, function: Callable[..., Any], disturbs: bool
    ) -> Callable[..., Any]:
        method = name.partition(".")[2]
        if method.startswith("_") and method != "__init__":
            return function

        @wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            ident = threading.get_ident()
            if ident in self._inside:
                return function(*args, **given)
            thread = self._threads.setdefault(ident, len(self._threads))
            number = self._counts[thread, name]
            self._counts[thread, name] += 1
            self._inside.add(ident)
            try:
                if number in (TRIED if "." in name else TRIED[:1]):
                    signature = inspect.signature(function)
                    bound = signature.bind(*args, **given)
                    bound.apply_defaults()
                    key = thread, name, number
                    self._try_all(key, function, signature, bound.arguments)
                try:
                    result = function(*args, **given)
                except Exception:
                    self._forget(thread, name, number)
                    raise
                self._returned.append(result)
                return result
            finally:
                self._inside.discard(ident)

        return call

    def restart(self) -> None:
        """Count calls from 0 again, as the case is another one."""
        self._threads.clear()
        self._counts.clear()
        if self.is_contract:
            self.promised.clear()

    def _forget(self, *call: Any) -> None:
        """Promise nothing about a call that is not valid."""
        self.promised = {
            key: error for key, error in self.promised.items() if key[:3] != call
        }

    def _try_all(
        self,
        call: tuple[int, str, int],
        function: Callable[..., Any],
        signature: inspect.Signature,
        given: dict[str, Any],
    ) -> None:
        if self.is_contract:
            self._note_promises(call, function, signature, given)
            return
        name = call[1]
        before = _held(name, given)
        for part in self._parts_of(given):
            for wrong in wrong_values(part.value):
                promised = self.promised.get((*call, part.label, wrong.words))
                if promised is None:
                    continue
                self.tried.add((name, part.label))
                own = _held("", {"": wrong.value})
                changed = part.put(given, wrong.value)
                error = outcome(name, function, signature, changed)
                self._judge(
                    f"{name} with {part.label} of {wrong.words}",
                    error,
                    promised,
                    _held(name, given) == before
                    and _held("", {"": wrong.value}) == own,
                )

    def _judge(
        self,
        what: str,
        error: Exception | None,
        promised: type[Exception],
        is_unchanged: bool,
    ) -> None:
        """Raise a Disagreement if a wrong call has not raised, or has changed something."""
        if not isinstance(error, (*INPUT_ERRORS, promised)):
            found = "returned" if error is None else f"raised {error!r}"
            raise Disagreement(what, "as a whole", found, promised.__name__) from error
        if not is_unchanged:
            raise Disagreement(
                f"arguments and state after {what}",
                f"which raised {error!r}",
                "changed",
                "as before",
            ) from error

    def _note_promises(
        self,
        call: tuple[int, str, int],
        function: Callable[..., Any],
        signature: inspect.Signature,
        given: dict[str, Any],
    ) -> None:
        own = copied(given)
        for part in self._parts_of(given):
            for wrong in wrong_values(part.value):
                if wrong.kind not in self.kinds:
                    continue
                # a dataclass may reject the value itself
                with suppress(Exception):
                    value = wrong.value
                    if isinstance(value, MUTABLE):
                        value = copied({"": value})[""]
                    changed = part.put(own, value)
                    error = outcome(call[1], function, signature, changed)
                    if error is None:
                        own = copied(given)
                    elif self._is_promised(call[1], error, changed):
                        key = (*call, part.label, wrong.words)
                        self.promised[key] = type(error)

    def _parts_of(self, given: Mapping[str, Any]) -> Iterator[CallPart]:
        """Yield the arguments of a call, and the fields of those that are dataclasses.

        What an operation has returned is valid as a whole: its fields are not inputs.
        """
        for name, value in given.items():
            if name == "self":
                continue
            yield CallPart(name, value, name)
            is_returned = any(returned is value for returned in self._returned)
            if is_dataclass(value) and not isinstance(value, type) and not is_returned:
                for field in fields(value):
                    label = field.name
                    if not isinstance(value, AttentionOptions):
                        label = f"{name}.{label}"
                    if field.init:
                        yield CallPart(
                            label, getattr(value, field.name), name, field.name
                        )

    def _is_promised(
        self, name: str, error: Exception, arguments: Mapping[str, Any]
    ) -> bool:
        is_explained = isinstance(error, INPUT_ERRORS) and EXPLAINED.search(str(error))
        # ranks of a copied group exchange nothing
        if not is_explained or isinstance(error.__cause__, RankError):
            return False
        if self.candidate.promises_all or "." in name:
            return True
        return why_outside(name, arguments, self.candidate.support) is None


def outcome(
    name: str,
    function: Callable[..., Any],
    signature: inspect.Signature,
    arguments: dict[str, Any],
) -> Exception | None:
    """Return the error of a call, or None. A constructor makes a new object."""
    if name.endswith(".__init__"):
        arguments = {**arguments, "self": object.__new__(type(arguments["self"]))}
    bound = inspect.BoundArguments(signature, arguments)
    try:
        function(*bound.args, **bound.kwargs)
    except Exception as error:
        return error
    return None


def _held(name: str, given: Mapping[str, Any]) -> Any:
    """Return the state of a call's object and arguments, of which a constructor has no object."""
    if name.endswith(".__init__"):
        given = {
            argument: value for argument, value in given.items() if argument != "self"
        }
    return state_of(dict(given), COMPUTED, whole=True)


def copied(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments as copies, but for what cannot be copied.

    They are copied together, as one may be a part of another.
    """
    with suppress(Exception):
        return copy.deepcopy(dict(given))
    found = {}
    for name, value in given.items():
        found[name] = value
        with suppress(Exception):
            found[name] = copy.deepcopy(value)
    return found
