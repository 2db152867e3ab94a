"""Source of a SUPPORT that a probe has found."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from textwrap import wrap
from typing import Any

from ..base.support import Support
from ..cases.option_pairs import Choice
from .probe_calls import STRIDES, words


def layouts(values: dict[str, list[str]]) -> dict[str, Any]:
    """Return the fields about KV layouts, strides and alignment.

    Args:
        values: The values that are taken, with the key "layout" and those of STRIDES.
    """
    taken = values["layout"]
    found: dict[str, Any] = {}
    strides: dict[str, str] = {}
    if "hnd" not in taken:
        found["kv_layouts"] = ["NHD"]
    if "every other element" not in taken:
        rows = "rows" if {"interleaved", "interleaved hnd"} & {*taken} else "packed"
        strides |= {"key_cache": rows, "value_cache": rows}
        if rows == "rows" and "padded" not in taken:
            found["alignment"] = 16
    for name, forms in ((name, values[name]) for name in STRIDES if name in values):
        if needed := _needed_strides(forms):
            strides[name.split()[0]] = needed
        if needed == "rows" and name != "block_table strides" and "padded" not in forms:
            found["alignment"] = 16
    return found | ({"strides": strides} if strides else {})


def _needed_strides(forms: Sequence[str]) -> str:
    """Return the strides that a tensor needs of which these forms are taken; empty if any."""
    if {"every other element", "every other entry"} & {*forms}:
        return ""
    if {"fused per head", "heads first", "padded", "wider"} & {*forms}:
        return "rows"
    return "packed heads" if "fused" in forms else "packed"


def lengths(batches: list[str]) -> dict[str, Any]:
    """Return the field about numbers of new tokens, if not all are taken.

    Args:
        batches: The kinds of batches that are taken.
    """
    if "mixed" in batches:
        return {}
    if "prefill" in batches:
        return {"query_lens": range(1, 1 << 20)}
    return {"query_lens": range(1, 6 if "verification" in batches else 2)}


def as_python(found: dict[str, Any], comments: list[str]) -> str:
    """Return the source of a Support.

    Args:
        found: Its fields.
        comments: Lines above it.

    Raises:
        ValueError: It contradicts itself.
    """
    options = found["options"]
    if all(value is None for value in options.values()):
        found = found | {"options": [*options]}
    Support(**found)  # raises if it contradicts itself
    lines = ["from pagetwin.conformance import Support", "", *comments]
    lines.append("SUPPORT = Support(")
    for field in fields(Support):
        value = found.get(field.name)
        if value is not None and value != {}:
            lines.append(f"    {field.name}={value!r},")
    return "\n".join([*lines, ")"])


def comments(
    wrong: Mapping[str, Sequence[Choice]], untried: dict[str, list[str]]
) -> list[str]:
    """Return the lines about wrong results, and about what was not tried.

    Args:
        wrong: The changes of calls with a wrong result, by what was wrong.
        untried: Values that were not tried, by property, in words.
    """
    lines: list[str] = []
    for failure, calls in wrong.items():
        values: dict[str, list[str]] = {}
        for changes in calls:
            ((name, value),) = (
                changes.items() if len(changes) == 1 else [(words(changes), "")]
            )
            values.setdefault(name, []).append(value)
        text = f"wrong, {failure}: {'; '.join(_shown(values))}"
        lines += wrap(text, 96, initial_indent="# ", subsequent_indent="#   ")
    if untried:
        lines.append("# The time was over. What was not tried is not declared.")
    return lines + [f"# not tried: {words}" for words in _shown(untried)]


def _shown(values: Mapping[str, Sequence[str]]) -> list[str]:
    """Return each property with its values, in words."""
    return [
        f"{name} {', '.join(dict.fromkeys(its))}".strip()
        for name, its in values.items()
    ]
