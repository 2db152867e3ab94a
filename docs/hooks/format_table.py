"""Tables and the figure of cache formats: what each costs a small trained model, and its times.

The errors come from the record that tests/gpu/serving/format_errors.py writes, and the times from
that of `pagetwin bench --suite formats`.
"""

import math
from pathlib import Path
from typing import Any

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


SUFFIXES = {
    "fp8_e4m3": "fp8",
    "int8_per_token_head": "int8",
    "fp8_per_token_head": "fp8-token",
    "int4_per_token_head": "int4",
    "nvfp4": "nvfp4",
}
"""How the names of workloads end, by format."""
BATCHES = {
    "decode-64x4k": "64 decodes of 4,096 keys",
    "decode-256-ragged": "256 decodes of very different lengths",
    "decode-8x32k": "8 decodes of 32,768 keys",
    "decode-1x128k": "one decode of 131,072 keys",
    "verify-32x4x4k": "32 requests with 4 draft tokens on 4,096 keys",
    "prefill-4x2k": "prefill, 4 x 2,048 tokens",
    "chunk-2k-on-14k": "2,048 tokens on 14,336 keys",
    "write-8k": "write of 8,192 tokens, as a share of the copying rate",
}
"""What the batches of the suite are, by the beginning of their names."""
PAGE, BASELINE = "-page", "ours-bf16"
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 300, 70, 250
"""Sizes of the figure, and where its axes meet."""


def _read_times(device: str, record: Path | None) -> dict[str, dict[str, Any]]:
    """Return the rows of a device by the names of their workloads."""
    rows = read_rows("format_times", record or DATA)
    return {row["name"]: row for row in rows if row["device"] == device}


def format_times_table(device: str, record: Path | None = None) -> str:
    """Return the time of each batch from each format, relative to the same numbers in bfloat16.

    Args:
        device: whose runs are shown.
        record: Optional. Folder of the record. If None, that of the pages.
    """
    times = _read_times(device, record)
    if not times:
        return NO_RUN
    found = [
        "| batch | bfloat16 | FP8, one scale | int8 per token | FP8 per token | int4 per token |"
        " nvfp4 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for batch, words in BATCHES.items():
        for end in ("", PAGE):
            rows = [times.get(f"{batch}-{name}{end}") for name in SUFFIXES.values()]
            if not any(rows):
                continue
            base = next((row["others"].get(BASELINE) for row in rows if row), None)
            label = f"{words}; codes and scales in vLLM's pages" if end else words
            cells = ["" if row is None else _relative(row) for row in rows]
            base_time = "" if base is None else f"{base:,.0f} us"
            found.append("| " + " | ".join([label, base_time, *cells]) + " |")
    return "\n".join(found)


def _relative(row: dict[str, Any]) -> str:
    """Return the time of a workload relative to 16 bits, or its share of the copying rate."""
    if BASELINE not in row["others"]:
        return f"{row['share']:.0%}"
    return f"{row['us'] / row['others'][BASELINE]:.2f}"


def format_peers_table(device: str, record: Path | None = None) -> str:
    """Return this project's times beside those of vLLM's Triton kernels, which were run."""
    rows = _read_times(device, record).values()
    found = ["| workload | ours | vLLM | ratio |", "|---|---:|---:|---:|"]
    for row in rows:
        if peer := row["others"].get("vllm"):
            ratio = row["us"] / peer
            found.append(
                f"| `{row['name']}` | {row['us']:,.1f} us | {peer:,.1f} us |"
                f" {ratio:.2f} |"
            )
    return "\n".join(found) if len(found) > 2 else NO_RUN


def format_figure(device: str, record: Path | None = None) -> str:
    """Return a picture of the error of attention and the time of a decode, for each format."""
    times = _read_times(device, record)
    errors = {row["format"]: row for row in read_rows("cache_formats", record or DATA)}
    points = {"auto": (1.0, errors["auto"]["error"])} if "auto" in errors else {}
    for name, suffix in SUFFIXES.items():
        row = times.get(f"decode-64x4k-{suffix}")
        if row and name in errors:
            points[name] = (row["us"] / row["others"][BASELINE], errors[name]["error"])
    if len(points) < 2:
        return NO_RUN

    def place(time: float, error: float) -> tuple[float, float]:
        across = LEFT + (time - 0.2) * (WIDTH - LEFT - 10)
        return across, BOTTOM - (math.log10(error) + 3) / 2.4 * (BOTTOM - 20)

    parts = [
        f'<line x1="{LEFT}" y1="{BOTTOM}" x2="{WIDTH - 10}" y2="{BOTTOM}"/>',
        f'<line x1="{LEFT}" y1="20" x2="{LEFT}" y2="{BOTTOM}"/>',
    ]
    for time in (0.2, 0.4, 0.6, 0.8, 1.0, 1.2):
        across, _ = place(time, 1.0)
        words = (
            f'<text x="{across}" y="{BOTTOM + 18}" text-anchor="middle">{time}</text>'
        )
        parts.append(words)
    for error in (0.001, 0.01, 0.1):
        _, down = place(1.0, error)
        parts.append(
            f'<line class="grid" x1="{LEFT}" y1="{down:.0f}" x2="{WIDTH - 10}" y2="{down:.0f}"/>'
            f'<text x="{LEFT - 8}" y="{down + 4:.0f}" text-anchor="end">{error:g}</text>'
        )
    above = 0.0
    for name, (time, error) in sorted(points.items(), key=lambda item: -item[1][1]):
        across, down = place(time, error)
        # a name beside the one above it is on the other side of its point
        is_left = down - above < 14
        side = (-9, "end") if is_left else (9, "start")
        above = 0.0 if is_left else down
        parts.append(
            f'<circle cx="{across:.0f}" cy="{down:.0f}" r="5"/>'
            f'<text x="{across + side[0]:.0f}" y="{down + 4:.0f}"'
            f' text-anchor="{side[1]}">{name}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 12}" text-anchor="middle">time of 64'
        " decodes of 4,096 keys, relative to bfloat16</text>"
        f'<text x="{LEFT}" y="12">error of attention, relative to the norm of its outputs</text>'
    )
    label = "Time of a decode and error of attention of each cache format"
    return (
        f'<figure class="formats"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{label}">' + "".join(parts) + "</svg></figure>"
    )
