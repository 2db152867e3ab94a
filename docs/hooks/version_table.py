"""Table of the versions on which the quick tests ran, from the record of `make matrix`."""

import json
from typing import Any

from page_data import DATA

RECORD = DATA / "versions.json"
PACKAGES = ("python", "torch", "triton", "numpy", "xformers")


def version_table() -> str:
    """Return one row per declared combination: the versions, and the result or why none."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    lines = [
        "| corner | Python | torch | triton | numpy | xFormers | result | date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, entry in record["corners"].items():
        cells = [
            f"`{name}`: {entry['meaning']}",
            *_versions(entry),
            _result(entry),
            entry["date"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _versions(entry: dict[str, Any]) -> list[str]:
    if "versions" in entry:
        return [entry["versions"].get(package, "none") for package in PACKAGES]
    wanted = (entry["python"], entry["torch"], entry["triton"], entry["numpy"])
    return [
        *(version.removeprefix("==") for version in wanted),
        "0.0.35" if entry["xformers"] else "none",
    ]


def _result(entry: dict[str, Any]) -> str:
    if "reason" in entry:
        return f"not run: {entry['reason']}"
    if "passed" not in entry:
        return "; ".join(entry["failures"])
    if entry["wheel"]:
        return "imports" if not entry["failed"] else entry["failures"][0]
    counts = ", ".join(
        f"{entry[outcome]:,} {outcome}" for outcome in ("passed", "failed", "skipped")
    )
    return f"{counts} in {entry['seconds']} s"
