"""File of known failures: laws that are expected to fail, and laws that are not run.

Example:

    [[xfail]]
    law = "values may be smaller than keys"
    reason = "the kernel reads one size: https://github.com/me/kernels/issues/12"

    [[quarantine]]
    law = "rows of a large batch are right"
    reason = "hangs the driver: https://github.com/me/kernels/issues/15"
    adapter = "my_decode.py"
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..running.law_names import law_names

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KINDS = ("xfail", "quarantine")
LINK = re.compile(r"https?://\S+")


@dataclass(frozen=True)
class XfailEntry:
    """One law that is not expected to hold.

    Args:
        kind: "xfail": the law runs and has to fail. "quarantine": it does not run.
        law: Its sentence.
        reason: Why, with a link to an issue.
        adapter: Optional. The adapter, as `--pagetwin` gives it. If None, every adapter.
        file: The file of the entry.
    """

    kind: str
    law: str
    reason: str
    adapter: str | None
    file: str


def read_entries(files: Sequence[str]) -> list[XfailEntry]:
    """Return the entries of some files.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is not TOML of this form, an entry has no link or names no law, or two
            entries are about the same law.
    """
    entries = [entry for file in files for entry in _read(file)]
    found: set[tuple[str, str | None]] = set()
    for entry in entries:
        if {(entry.law, entry.adapter), (entry.law, None)} & found:
            raise ValueError(f"{entry.file}: expected one entry for {entry.law!r}")
        found.add((entry.law, entry.adapter))
    return entries


def entries_of(
    entries: Sequence[XfailEntry], kind: str, adapter: str
) -> dict[str, XfailEntry]:
    """Return the entries of one kind about an adapter, by law. Two paths may be the same file."""
    return {
        entry.law: entry
        for entry in entries
        if entry.kind == kind
        and (
            entry.adapter is None
            or Path(entry.adapter).resolve() == Path(adapter).resolve()
        )
    }


def _read(file: str) -> Iterator[XfailEntry]:
    try:
        tables = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: expected TOML: {error}") from None
    if unknown := sorted(tables.keys() - set(KINDS)):
        raise ValueError(
            f"{file}: {unknown[0]!r} is unknown: expected [[xfail]] and [[quarantine]]"
        )
    for kind, listed in tables.items():
        if not isinstance(listed, list):
            raise ValueError(f"{file}: [{kind}] is one table: expected [[{kind}]]")
        for number, fields in enumerate(listed, 1):
            yield _entry(file, f"{file}: {kind} {number}", kind, fields)


def _entry(file: str, where: str, kind: str, fields: Any) -> XfailEntry:
    """Return an entry.

    Args:
        file: Its file.
        where: The file and the number of the entry, for errors.
        kind: One of KINDS.
        fields: What the file has.
    """
    is_right = isinstance(fields, dict) and {"law", "reason"} <= fields.keys()
    if not is_right or fields.keys() - {"law", "reason", "adapter"}:
        has = ", ".join(fields) if isinstance(fields, dict) else repr(fields)
        raise ValueError(
            f"{where} has {has or 'no field'}: expected law, reason and perhaps adapter"
        )
    for name, value in fields.items():
        if not isinstance(value, str):
            raise ValueError(f"{where}: {name} = {value!r}: expected a string")
    law = " ".join(fields["law"].replace("_", " ").split())
    laws = [name for _, name in law_names()]
    if law not in laws:
        close = get_close_matches(law, laws, 1)
        likely = f", such as {close[0]!r}" if close else ""
        raise ValueError(
            f"{where}: no law is called {fields['law']!r}: expected the sentence of a law, as a"
            f" report shows it{likely}"
        )
    if not LINK.search(fields["reason"]):
        raise ValueError(
            f"{where} ({law}): reason = {fields['reason']!r}: expected a link to an issue in it"
        )
    adapter = fields.get("adapter")
    if adapter is not None and adapter.endswith(".py") and not Path(adapter).is_file():
        raise ValueError(
            f"{where} ({law}): adapter = {adapter!r}: the file does not exist"
        )
    return XfailEntry(kind, law, fields["reason"].strip(), adapter, file)
