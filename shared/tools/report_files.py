"""Files of a conformance report: JSON, Markdown, JUnit XML, and one HTML page."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .files import check_outputs, write_text

if TYPE_CHECKING:
    from ..conformance.harness.report import Report

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


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report. None if an option is not given.

    `trace` is checked with the others, and written by `solution_commands.write_traces`.
    """

    json: Path | None = None
    markdown: Path | None = None
    junit: Path | None = None
    html: Path | None = None
    trace: Path | None = None

    def check(self) -> None:
        """Raise if a file could not be written, before anything is computed.

        Raises:
            OSError, ValueError: As `check_outputs`.
            ImportError: The page is requested, and jinja2 is not installed.
        """
        check_outputs(**vars(self))
        if self.html is not None and importlib.util.find_spec("jinja2") is None:
            raise ImportError(
                "--html needs jinja2: expected after pip install 'pagetwin[report]'"
            )

    def write(self, report: "Report") -> list[Path]:
        """Write the files, each completely or not at all, and return their paths."""
        from .report_page import render_page

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
