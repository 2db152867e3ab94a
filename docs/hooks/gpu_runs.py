"""Runs on GPUs: the table of the latest results, and the newest summaries."""

import re
from pathlib import Path

from page_data import DATA

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "tests" / "gpu" / "README.md"
LATEST = "## The latest result of each run\n"


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


def gpu_records(folder: Path = DATA) -> str:
    """Return the newest summary of the tests, the replays and the campaigns, folded."""
    paths = sorted(folder.glob("gpu_*.md"))
    return "\n\n".join(_folded(path.read_text(encoding="utf-8")) for path in paths)


def _folded(text: str) -> str:
    """Return a summary that shows its date, its commit and its parts until it is opened."""
    machine, *parts = re.findall(r"(?m)^#+ (.*)$", text)
    commit = re.findall(r"(?m)^Commit (\w{7})", text)
    title = f"{machine}, commit {commit[0]}: {'; '.join(parts)}".replace('"', "'")
    body = re.sub(r"(?m)^#+ (.*)$", r"**\1**", text.strip())
    return "\n".join(
        [f'??? note "{title}"', "", *(f"    {line}" for line in body.splitlines())]
    )
