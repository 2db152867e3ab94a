"""The table of cache formats: what each of them costs a small trained model.

The figures come from the record that tests/gpu/serving/format_errors.py writes.
"""

import json
from pathlib import Path

from page_data import DATA

NO_RUN = "*No run is recorded yet.*"


def cache_format_table(record: Path | None = None) -> str:
    """Return the error of attention, the perplexity and the needle of each format."""
    path = DATA / "cache_formats.jsonl" if record is None else record
    if not path.exists():
        return NO_RUN
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [
        "| format | bytes per slot and head of 128 | error of attention, mean of the layers"
        " | largest | perplexity | weight of a needle |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for line in lines:
        found.append(
            f"| `{line['format']}` | {line['bytes']} | {line['error']:.2%} |"
            f" {line['largest_error']:.2%} | {line['perplexity']:.2f} |"
            f" {line['needle_weight']:.4f} |"
        )
    return "\n".join(found)
