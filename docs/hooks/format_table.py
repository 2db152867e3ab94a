"""The table of cache formats: what each of them costs a small trained model.

The figures come from the record that tests/gpu/serving/format_errors.py writes.
"""

from pathlib import Path

from page_data import DATA, read_rows
from pagetwin.contract.cache_formats import FORMATS

NO_RUN = "*No run is recorded yet.*"


def cache_format_table(record: Path | None = None) -> str:
    """Return the error of attention, the perplexity and the needle of each format.

    Args:
        record: Optional. Folder of the record. If None, that of the pages.
    """
    rows = read_rows("cache_formats", record or DATA)
    if not rows:
        return NO_RUN
    rows.sort(key=lambda row: [*FORMATS].index(row["format"]))
    found = [
        "| format | bytes per slot and head of 128 | error of attention, mean of the layers"
        " | largest | perplexity | weight of a needle |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for line in rows:
        found.append(
            f"| `{line['format']}` | {line['bytes']} | {line['error']:.2%} |"
            f" {line['largest_error']:.2%} | {line['perplexity']:.2f} |"
            f" {line['needle_weight']:.4f} |"
        )
    return "\n".join(found)
