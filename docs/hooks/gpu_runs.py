"""Runs on GPUs: the table of the latest results, and the summaries of the records."""

import re
from pathlib import Path

import bench_table

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "tests" / "records"
GUIDE = ROOT / "tests" / "gpu" / "README.md"
LATEST = "## The latest result of each run\n"
OWN_PAGES = (
    "-bench",
    f"-{bench_table.EXTENDED}",
    "-shapes",
    "-verdicts",
    "-parallel",
)
"""Ends of the names of records that are shown on pages of their own."""


def latest_gpu_runs(guide: Path = GUIDE) -> str:
    """Return what the guide says about the latest result of each run, with links of this page.

    Raises:
        ValueError: The guide has no such section.
    """
    text = guide.read_text(encoding="utf-8")
    if LATEST not in text:
        raise ValueError(f"{guide} has no section {LATEST.strip()!r}")
    section = text.partition(LATEST)[2].partition("\n## ")[0].strip()
    return section.replace("](../../docs/", "](")


def gpu_records(folder: Path = RECORDS) -> str:
    """Return the summaries of the runs on GPUs, folded, the newest first."""
    parts = []
    for path in sorted(folder.glob("20*.json"), reverse=True):
        if not path.stem.endswith(OWN_PAGES):
            text = path.with_suffix(".md").read_text(encoding="utf-8")
            parts.append(_folded(path.stem, text))
    return "\n\n".join(parts) or "*No run on a GPU is recorded yet.*"


def _folded(name: str, text: str) -> str:
    """Return a summary that shows its date, its commit and its parts until it is opened."""
    headings = re.findall(r"(?m)^## (.*)$", text) or re.findall(r"(?m)^# (.*)$", text)
    commit = re.search(r"(?m)^Commit (\w+)", text) or re.search(
        r"-([0-9a-f]{7})-", name
    )
    title = f"{name[:10]}, commit {commit[1] if commit else 'unknown'}: "
    title += "; ".join(headings).replace('"', "'")
    body = re.sub(r"(?m)^#+ (.*)$", r"**\1**", text.strip())
    return "\n".join(
        [f'??? note "{title}"', "", *(f"    {line}" for line in body.splitlines())]
    )
