"""Files of a conformance report: JSON, Markdown, JUnit XML, and one HTML page."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..contract.extras import require
from .files import check_outputs, write_text

if TYPE_CHECKING:
    from ..conformance.reports.report import Report

JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the report to this file, as JSON.")
]
MarkdownFile = Annotated[
    Path | None,
    typer.Option("--markdown", help="Write the report to this file, as Markdown."),
]
JUnitFile = Annotated[
    Path | None,
    typer.Option("--junit", help="Write the report to this file, as JUnit XML."),
]
HtmlFile = Annotated[
    Path | None,
    typer.Option(
        "--html", help="Write the report to this file, as a page with pictures."
    ),
]


SECONDS_BETWEEN = 2.0
"""A report with the laws so far is written at most this often."""


@dataclass
class ReportFiles:
    """The files of a report. None if an option is not given.

    `trace` is checked with the others, and written by `solution_commands.write_traces`.
    """

    json: Path | None = None
    markdown: Path | None = None
    junit: Path | None = None
    html: Path | None = None
    trace: Path | None = None
    _written: float = field(default=-SECONDS_BETWEEN, init=False)

    def check(self) -> None:
        """Raise if a file could not be written, before anything is computed.

        Raises:
            OSError, ValueError: As `check_outputs`.
            ImportError: The page is requested, and jinja2 is not installed.
        """
        names = ("json", "markdown", "junit", "html", "trace")
        outputs = {name: getattr(self, name) for name in names}
        if any(outputs.values()):
            check_outputs(**outputs)
        if self.html is not None:
            require("--html", "jinja2")

    def write_so_far(self, make: Callable[[], "Report"]) -> None:
        """Write the files without pictures, of a report that is not complete yet.

        So a run that is ended by force leaves the laws that it has judged.

        Args:
            make: Returns the report. It is called if there is a file to write.
        """
        now = time.monotonic()
        if self.json is self.markdown is self.junit is None:
            return
        if now - self._written < SECONDS_BETWEEN:
            return
        report = make()
        for path, render in (
            (self.json, report.to_json),
            (self.markdown, report.to_markdown),
            (self.junit, report.to_junit),
        ):
            if path is not None:
                write_text(path, render())
        self._written = now

    def write(self, report: "Report") -> list[Path]:
        """Write the files, each completely or not at all, and return their paths."""
        from ..conformance.reports.page import render_page

        written = [] if self.trace is None else [self.trace]
        for path, render in (
            (self.json, report.to_json),
            (self.markdown, report.to_markdown),
            (self.junit, report.to_junit),
            (self.html, lambda: render_page(report)),
        ):
            if path is not None:
                write_text(path, render())
                written.append(path)
        return written
