"""The HTML page of a conformance report: one file without scripts, in light and dark colours.

For each symptom it shows one reproduction, and for a wrong result of attention three pictures: the
failing tile, the block map, and the errors of tokens and heads.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..base.results import SEVERITIES, Symptom
from .report import Report

WIDTH = 680
"""Width of a picture in its own units."""
LABELS = 46
"""Width of the labels on the left side of a picture."""
TEXT = 11
"""Height of a line of text."""
DIGIT = 7
"""Width that no digit of a label exceeds."""


def render_page(report: Report) -> str:
    """Return the page as text.

    Raises:
        ImportError: jinja2 is not installed.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    symptoms = []
    for symptom in report.symptoms():
        words = _describe(report, symptom)
        drawn = {"tile", "blocks", "errors"}
        symptoms.append(
            {
                name: Markup(word) if name in drawn else word
                for name, word in words.items()
            }
        )
    return environment.from_string(template).render(
        report=report, symptoms=symptoms, others=_other_sections(report)
    )


def _other_sections(report: Report) -> list[tuple[str, list[str]]]:
    """Return the title and the lines of each section that is not about a failure."""
    reasons = report.why_undeclared().items()
    outside = report.outcomes_outside()
    return [
        ("Notes", report.notes),
        (
            "Laws that are not finished",
            [f"{result.law}: {result.reason}" for result in report.unfinished],
        ),
        (
            "Why laws are undeclared",
            [f"{count}: {reason}" for reason, count in reasons],
        ),
        (
            "Outside of the declared support",
            [f"{how}: {what}" for how, what in outside],
        ),
    ]


def _describe(report: Report, symptom: Symptom) -> dict[str, Any]:
    """Return what the page shows of a symptom."""
    first = symptom.first
    picture = first.details.get("picture", {})
    blocks = picture.get("blocks")
    return {
        "title": symptom.title,
        "severity": SEVERITIES[symptom.severity],
        "results": symptom.results,
        "first": first,
        "picture": picture,
        "program": report.reproducer(first) if first.case else "",
        "tile": draw_tile(picture) if picture else "",
        "blocks": draw_blocks(picture) if blocks else "",
        "errors": draw_errors(picture) if picture else "",
    }


def draw_tile(picture: dict[str, Any]) -> str:
    """Return the mask around the failing row as SVG: queries are rows, keys are columns."""
    tile = picture["tile"]
    lines = tile["visible"]
    first_query, first_key = tile["first_query"], tile["first_key"]
    count = max((len(line) for line in lines), default=0)
    if not count:
        return _svg("The request has no keys.", 30, [_text(0, 20, "No keys.")])
    cell = min(18.0, (WIDTH - LABELS) / count)
    top = 20.0
    height = min(cell, 14.0)
    body = [_text(LABELS, 12, f"keys {first_key} to {first_key + count - 1}")]
    for number, line in enumerate(lines):
        y = top + number * height
        query = first_query + number
        gap = abs(query - picture["query"]) * height
        if gap == 0 or (number % 4 == 0 and gap >= TEXT):
            body.append(_text(0, y + height - 2, f"q {query}"))
        for start, end, mark in _runs(line):
            fill = "var(--visible)" if mark == "#" else "var(--masked)"
            body.append(
                _rect(LABELS + start * cell, y, (end - start) * cell, height, fill)
            )
    bottom = top + len(lines) * height
    size = picture["blocks"].get("block_size", 0) if picture["blocks"] else 0
    for key in range(first_key, first_key + count + 1):
        if size > 1 and key % size == 0:
            x = LABELS + (key - first_key) * cell
            body.append(_line(x, top, x, bottom))
    y = top + (picture["query"] - first_query) * height
    body.append(_frame(LABELS, y, count * cell, height, "var(--row)"))
    for key in tile["keys"]:
        if first_key <= key < first_key + count:
            x = LABELS + (key - first_key) * cell
            body.append(_frame(x, y, cell, height, "var(--key)"))
    legend = [("var(--visible)", "visible"), ("var(--masked)", "masked")]
    legend.append(("var(--row)", "the wrong row"))
    if tile["keys"]:
        legend.append(("var(--key)", "lost or added"))
    edges = f" Lines are block edges ({size} slots)." if size > 1 else ""
    label = f"Keys that the queries of request {picture['request']} attend to.{edges}"
    return _svg(label, bottom + 4, body, legend)


def draw_blocks(picture: dict[str, Any]) -> str:
    """Return the blocks of the cache as SVG, coloured by request."""
    blocks = picture["blocks"]
    shown = blocks["shown"]
    users: dict[int, list[int]] = {}
    for req, row in enumerate(blocks["rows"]):
        for block in row:
            users.setdefault(block, []).append(req)
    marked: dict[int, list[int]] = {}
    for block, slot in blocks["keys"]:
        marked.setdefault(block, []).append(slot)
    requests = [list(dict.fromkeys(users.get(block, []))) for block in shown]
    labels = [
        _block_label(block, reqs) for block, reqs in zip(shown, requests, strict=True)
    ]
    widest = max((len(label) for label in labels), default=1) * DIGIT + 4
    columns = max(1, min(16, WIDTH // widest))
    width = (WIDTH - 8) / columns
    body = []
    height = 30.0
    for number, (block, reqs) in enumerate(zip(shown, requests, strict=True)):
        x, y = number % columns * width, number // columns * height
        fill = "var(--free)"
        if reqs:
            fill = "var(--own)" if picture["request"] in reqs else "var(--other)"
        body.append(_rect(x + 1, y + 1, width - 2, height - 12, fill))
        body.append(_text(x + 2, y + height - 2, labels[number]))
        for slot in marked.get(block, []):
            step = (width - 2) / blocks["block_size"]
            body.append(
                _rect(
                    x + 1 + slot * step, y + 1, max(step, 2), height - 12, "var(--key)"
                )
            )
    bottom = -(-len(shown) // columns) * height
    legend = [("var(--own)", "blocks of the failing request")]
    legend += [("var(--other)", "of others"), ("var(--free)", "not allocated: poison")]
    if marked:
        legend.append(("var(--key)", "slot of a lost or added key"))
    words = "Blocks of the cache by id, each with a request (r) that uses it (+2: two others too)."
    left_out = blocks["num_blocks"] - len(shown)
    if left_out:
        words += f" {left_out} further blocks are not shown."
    return _svg(words, bottom + 4, body, legend)


def _block_label(block: int, reqs: list[int]) -> str:
    """Return a block's id, its first request, and the number of its other requests."""
    if not reqs:
        return f"{block}"
    more = f"+{len(reqs) - 1}" if len(reqs) > 1 else ""
    return f"{block}: r{reqs[0]}{more}"


def draw_errors(picture: dict[str, Any]) -> str:
    """Return the error of each token and head as SVG: larger errors are more opaque."""
    from math import log10

    errors = [
        [float("inf") if error == "inf" else float(error) for error in line]
        for line in picture["errors"]
    ]
    finite = [error for line in errors for error in line if 0 < error < float("inf")]
    most = max(finite, default=1.0)
    # smaller errors are roundings
    least = max(min(finite, default=1.0), 1e-6 * most)
    heads = max((len(line) for line in errors), default=1)
    cell = min(26.0, (WIDTH - LABELS) / max(heads, 1))
    body = [_text(LABELS, 12, f"query heads 0 to {heads - 1}")]
    for token, line in enumerate(errors):
        y = 18 + token * 14
        if token % 4 == 0 or token == picture["token"]:
            body.append(_text(0, y + 11, f"t {token}"))
        for head, error in enumerate(line):
            share = 0.04
            if error == float("inf"):
                share = 1.0
            elif least < error and most > least:
                share = 0.08 + 0.92 * log10(error / least) / log10(most / least)
            elif error == most:
                share = 1.0
            x = LABELS + head * cell
            body.append(_rect(x, y, cell - 1, 13, "var(--key)", share))
    if picture["token"] < len(errors):
        y = 18 + picture["token"] * 14
        x = LABELS + picture["head"] * cell
        body.append(_frame(x, y, cell - 1, 13, "var(--row)"))
    words = f"Errors of tokens (t) and heads, up to {most:.1e}, on a logarithmic scale."
    return _svg(words, 24 + len(errors) * 14, body)


def _runs(line: str) -> list[tuple[int, int, str]]:
    """Return begin, end and character of each run of equal characters."""
    runs: list[tuple[int, int, str]] = []
    for number, mark in enumerate(line):
        if runs and runs[-1][2] == mark:
            runs[-1] = (runs[-1][0], number + 1, mark)
        else:
            runs.append((number, number + 1, mark))
    return runs


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return what the colours of a picture mean, as HTML."""
    spans = "".join(
        f'<span><i style="background:{fill}"></i>{escape(words)}</span>'
        for fill, words in entries
    )
    return f'<p class="legend">{spans}</p>' if entries else ""


def _rect(
    x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0
) -> str:
    shade = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        f' style="fill:{fill}"{shade}/>'
    )


def _frame(x: float, y: float, width: float, height: float, stroke: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        f' style="fill:none;stroke:{stroke};stroke-width:2"/>'
    )


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
        ' style="stroke:var(--quiet);stroke-width:1"/>'
    )


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def _svg(
    label: str,
    height: float,
    body: list[str],
    legend: Sequence[tuple[str, str]] = (),
) -> str:
    """Return a picture with its title above it and its legend below it."""
    return (
        f'<p class="quiet">{escape(label)}</p><div class="scroll" tabindex="0">'
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img"'
        f' aria-label="{escape(label, quote=True)}">{"".join(body)}</svg></div>'
        f"{_legend(legend)}"
    )
