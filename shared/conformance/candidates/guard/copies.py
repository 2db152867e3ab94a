"""Copies of the suite's functions that a candidate loads, under another name or from their source.

Python announces each code object that it executes as a module or from which it makes a function. A
code object that equals that of a function of the reference or of an oracle is a copy of it.
"""

from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType

LOADS = ("exec", "function.__new__")
"""Audit events of code that is executed as a module, or from which a function is made."""
FEWEST_BYTES = 120
"""Bytes of the shortest bytecode that counts: about 30 instructions. Shorter ones may be equal."""

Form = tuple[int, int, int, tuple[str, ...]]


class Copies:
    """Functions that must not be copied, and the copies that were loaded.

    Args:
        is_foreign: Whether a file may be one of a candidate. Another file may have equal functions,
            but none may be loaded twice.
    """

    def __init__(self, is_foreign: Callable[[str], bool]) -> None:
        self._is_foreign = is_foreign
        self._known: dict[Form, list[CodeType]] = {}
        self._names: dict[CodeType, set[str]] = {}
        self._found: dict[str, str] = {}

    def know(
        self,
        operation: str,
        functions: Iterable[FunctionType],
        folders: tuple[str, ...],
    ) -> None:
        """Remember the functions that compute the right result of an operation.

        Args:
            operation: Its name.
            functions: The functions, among them those of decorators.
            folders: Folders of the files whose functions count.
        """
        for function in functions:
            code = function.__code__
            is_right = code.co_filename.startswith(folders)
            if is_right and len(code.co_code) >= FEWEST_BYTES:
                self._known.setdefault(_form_of(code), []).append(code)
                self._names.setdefault(code, set()).add(operation)

    def forget(self) -> None:
        """Forget the copies that were loaded, before another candidate is imported."""
        self._found.clear()

    def note(self, code: object) -> None:
        """Note the copies in code that is loaded."""
        if not isinstance(code, CodeType):
            return
        for loaded in _codes_in(code):
            for right in self._known.get(_form_of(loaded), ()):
                is_other = loaded.co_filename != right.co_filename
                if is_other and not self._is_foreign(loaded.co_filename):
                    continue
                if loaded.co_code == right.co_code:
                    names = dict.fromkeys(self._names[right], right.co_name)
                    self._found = names | self._found

    def of(self, operation: str) -> str:
        """Return the name of a function of an operation that was copied, or nothing."""
        return self._found.get(operation, "")


def _form_of(code: CodeType) -> Form:
    return code.co_argcount, code.co_nlocals, len(code.co_consts), code.co_names


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)
