"""Collectors and items: the laws of an adapter as tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest._code.code import ExceptionInfo, TerminalRepr

from ..base.results import Result, Status
from ..running.law_names import law_names
from .tries import Adapter


class LawFailedError(Exception):
    """A law is broken, its adapter crashed, or a known failure holds.

    Args:
        text: What `pagetwin check` prints about it.
        summary: One line.
    """

    def __init__(self, text: str, summary: str) -> None:
        super().__init__(text)
        self.summary = summary


class LawItem(pytest.Item):
    """One law of one adapter. The name of the test is the sentence with underscores."""

    def __init__(self, *, area: str, law: str, adapter: Adapter, **given: Any) -> None:
        super().__init__(**given)
        self.area, self.law, self.adapter = area, law, adapter
        self.result: Result | None = None
        self.add_marker("pagetwin")
        self.extra_keyword_matches |= {area, law}

    def runtest(self) -> None:
        """Try the law.

        Raises:
            LawFailedError: The law is broken, crashes, hangs, misses an operation, or is a known
                failure that holds.
        """
        if entry := self.adapter.quarantined.get(self.law):
            raise _skipped(f"quarantine: {entry.reason}")
        is_expected = not self.config.getoption("runxfail")
        result = self.adapter.try_law(self.area, self.law, is_expected)
        self.result = result
        if result.status == Status.KNOWN:
            pytest.xfail(result.reason)
        if result.status in (Status.OUTSIDE, Status.UNFINISHED):
            raise _skipped(f"{result.status}: {result.reason}")
        if not result.ok:
            report = self.adapter.report(result)
            # importing rich takes longer than all else here
            from ..reports.terminal import symptom_text

            raise LawFailedError(
                symptom_text(report), f"{result.status}: {result.summary}"
            )

    def repr_failure(
        self, excinfo: ExceptionInfo[BaseException], style: Any = None
    ) -> str | TerminalRepr:
        """Return what is shown of a failure: a traceback of the plugin would say nothing."""
        if not isinstance(excinfo.value, LawFailedError):
            return super().repr_failure(excinfo)
        shown = excinfo.getrepr(style="value")
        if shown.reprcrash is not None:
            shown.reprcrash.message = excinfo.value.summary
            shown.reprcrash.path, shown.reprcrash.lineno = str(self.path), 1
        return shown

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return the file of the adapter, and the heading of a failure."""
        return self.path, 0, self.law


def _skipped(reason: str) -> BaseException:
    """Return what skips a test, with the file of the adapter as its location."""
    return pytest.skip.Exception(reason, _use_item_location=True)


class LawModule(pytest.Collector):
    """The laws of an adapter that is a module or a package."""

    def __init__(self, *, adapter: Adapter, **given: Any) -> None:
        super().__init__(**given)
        self.adapter = adapter

    def collect(self) -> Iterator[LawItem]:
        """Yield one item per law."""
        for area, law in law_names():
            yield LawItem.from_parent(
                self,
                name=law.replace(" ", "_"),
                area=area,
                law=law,
                adapter=self.adapter,
            )


class LawFile(LawModule, pytest.File):
    """The laws of an adapter that is a file."""


def collector_of(adapter: Adapter, parent: pytest.Collector) -> pytest.Collector:
    """Return the collector of an adapter's laws."""
    if adapter.path is not None:
        return LawFile.from_parent(parent, path=adapter.path, adapter=adapter)
    return LawModule.from_parent(
        parent, name=adapter.name, nodeid=adapter.name, adapter=adapter
    )
