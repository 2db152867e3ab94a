"""Tables of the attention options that the tests ran, alone and in pairs.

The tables are made from the record that the tests write.
"""

import inspect
import json
import re
from string import ascii_lowercase
from typing import Any

from page_data import DATA
from pagetwin.contract.attention_options import AttentionOptions

ARGUMENT = re.compile(r"^ {4}(\w+): ((?:.+\n?)(?:^ {8}.+\n?)*)", re.MULTILINE)
RECORD = DATA / "option_runs.json"
OFF = ("none", "as the query", "as the keys")
KINDS = (
    ("prefill", "batch", ("prefill",)),
    ("decode", "batch", ("decode",)),
    ("drafts", "batch", ("verification",)),
    ("mixed", "batch", ("mixed",)),
    ("encoder", "operation", ("encoder_attention",)),
    ("across", "causal", ("cross",)),
)
SPLIT = {
    "causal": (("bidirectional", ("no",)), ("flags", ("each request",))),
    "out": (("FP8 output", ("e4m3", "e5m2")),),
}
"""Options with columns of their own in the table of pairs: heading and values of each."""


def option_arguments() -> str:
    """Return one row per option, in the docstring's words: its meaning, and what None means."""
    words = inspect.getdoc(AttentionOptions) or ""
    arguments = words.partition("Args:\n")[2].partition("\n\n")[0]
    lines = ["| option | meaning | if not given |", "|---|---|---|"]
    for name, text in ARGUMENT.findall(arguments):
        sentences = re.split(r"(?<=[.]) (?=[A-Z(\[])", " ".join(text.split()))
        default = [
            sentence[8:] for sentence in sentences if sentence.startswith("If None, ")
        ]
        others = [
            sentence for sentence in sentences if not sentence.startswith("If None, ")
        ]
        # a first sentence that is only a shape does not give the meaning
        is_shape = others[0].startswith("[") and len(others[0]) < 30
        meaning = " ".join(others[: 1 + is_shape])
        shown = default[0][1:] if default else "off"
        lines.append(f"| `{name}` | {meaning.replace('|', chr(92) + '|')} | {shown} |")
    return "\n".join(lines)


def option_runs() -> str:
    """Return how many calls ran on which twin and device, as a list."""
    record = _record()
    count = len(record["choices"])
    return "\n".join(
        f"- {name}: {len(run['passed'])} of {count} calls correct"
        for name, run in record["runs"].items()
    )


def option_table() -> str:
    """Return one row per option: its meaning, its values, where it ran."""
    record = _record()
    headings = [heading for heading, _, _ in KINDS]
    lines = [
        f"| option | meaning | if not given | calls with | {' | '.join(headings)} |",
        "|---|---|---|---|" + "---|" * len(headings),
    ]
    for name, option in record["options"].items():
        counts = [
            f"`{value}` {_count(record, (name, (value,)))}"
            for value in option["values"]
            if value not in OFF
        ]
        held = [_cell(record, (name, None), kind, values) for _, kind, values in KINDS]
        lines.append(
            f"| `{name}` | {option['meaning']} | {option['default']}"
            f" | {', '.join(counts)} | {' | '.join(held)} |"
        )
    return "\n".join(lines)


def option_pairs() -> str:
    """Return how many calls had both of two options, or the letter of the reason for none."""
    record = _record()
    columns = _columns(record)
    lines = [
        "| |" + "".join(f" {heading} |" for heading, _, _ in columns[:-1]),
        "|---|" + "---|" * (len(columns) - 1),
    ]
    for row, (heading, name, values) in enumerate(columns[1:], 1):
        cells = [
            _cell(record, (name, values), other, its) for _, other, its in columns[:row]
        ]
        cells += [""] * (len(columns) - 1 - row)
        lines.append(f"| **{heading}** | {' | '.join(cells)} |")
    lines.append("")
    for letter, reason in _reasons(record).items():
        rejected = [pair for pair in record["rejected"] if pair["reason"] == reason]
        ones, others = (
            ", ".join(dict.fromkeys(_named(record, pair[side]) for pair in rejected))
            for side in ("one", "other")
        )
        lines.append(f"- *{letter}*: {ones} with {others}: {reason}.")
    return "\n".join(lines)


Side = tuple[str, tuple[str, ...] | None]
Column = tuple[str, str, tuple[str, ...] | None]
"""Heading, option and values. If the values are None, all that are not off."""


def _columns(record: dict[str, Any]) -> list[Column]:
    """Return the columns of the table of pairs: kinds of batches, then options in their order."""
    columns: list[Column] = list(KINDS)
    for name, option in record["options"].items():
        columns += [(heading, name, values) for heading, values in SPLIT.get(name, ())]
        if option["heading"]:
            columns.append((option["heading"], name, None))
    return columns


def _record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return record


def _reasons(record: dict[str, Any]) -> dict[str, str]:
    """Return the reasons of the rejected pairs by letter."""
    reasons = dict.fromkeys(pair["reason"] for pair in record["rejected"])
    return dict(zip(ascii_lowercase, reasons, strict=False))


def _named(record: dict[str, Any], side: list[Any]) -> str:
    """Return a rejected option, with its value if only that value is rejected."""
    name, values = side
    every = [value for value in record["options"][name]["values"] if value not in OFF]
    return f"`{name}`" if values == every else f"`{name}` ({', '.join(values)})"


def _values(record: dict[str, Any], side: Side) -> list[str]:
    name, values = side
    every = record["options"][name]["values"]
    return [v for v in every if (v not in OFF if values is None else v in values)]


def _count(record: dict[str, Any], *sides: Side) -> int:
    names = list(record["options"])
    wanted = [(names.index(side[0]), _values(record, side)) for side in sides]
    return sum(
        all(choice[index] in values for index, values in wanted)
        for choice in record["choices"]
    )


def _cell(
    record: dict[str, Any], side: Side, name: str, values: tuple[str, ...] | None
) -> str:
    """Return a count, or the letter of the reason if there is none, or a dash."""
    other = name, values
    if side[0] == name:
        return "-"  # two values of one option
    if count := _count(record, side, other):
        return str(count)
    sides = {one_side[0]: _values(record, one_side) for one_side in (side, other)}
    for pair in record["rejected"]:
        one, its = pair["one"], pair["other"]
        if {one[0], its[0]} == set(sides) and all(
            set(sides[option]) <= set(rejected) for option, rejected in (one, its)
        ):
            reasons = _reasons(record).items()
            return next(f"*{a}*" for a, reason in reasons if reason == pair["reason"])
    raise ValueError(f"{side} and {other} are neither drawn together nor rejected")
