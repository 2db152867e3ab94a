"""Job summary of a run: Markdown that GitHub shows on the page of a workflow."""

from collections.abc import Mapping
from dataclasses import replace

from ..base.results import Status
from ..reports.report import Report


def job_summary(report: Report, quarantined: Mapping[str, str]) -> str:
    """Return the report of one adapter as Markdown, without a row per undeclared law.

    Args:
        report: The results.
        quarantined: The reasons of laws that did not run, by law.
    """
    shown = [result for result in report.results if result.status != Status.OUTSIDE]
    lines = [replace(report, results=tuple(shown)).to_markdown()]
    if count := len(report.results) - len(shown):
        lines.append(f"{count} laws are about what the adapter does not declare.\n")
    known = {
        result.law: result.reason for result in shown if result.status == Status.KNOWN
    }
    for title, reasons in (("Known failures", known), ("Quarantine", quarantined)):
        if reasons:
            lines.append(f"## {title}\n")
            lines += [f"- {law}: {reason}" for law, reason in reasons.items()]
            lines.append("")
    return "\n".join(lines)
