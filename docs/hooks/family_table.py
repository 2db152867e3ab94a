"""Tables of engines and families of models, and of one trained model, from their records.

`tests/gpu/serving/engine_table.py` compares the tokens.
"""

import re
from typing import Any

from page_data import read_rows

NONE = "No record."
FAR = {"float32": 0.01, "bfloat16": 0.5}
"""Logits. Rounding moves them less; a larger margin is that of other attention."""
ENGINES = {
    "plain": "transformers alone",
    "transformers": "transformers, `generate`",
    "continuous": "transformers, continuous batching",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "nano": "nano-vllm",
}
"""The columns of every table, from a way of the record without its twin."""


ABSENT = {
    "sglang": lambda family: "not run",
    "nano": lambda family: "CUDA alone" if family == "Qwen3" else "no such model",
}
"""The cells of an engine that has no rows."""


def _rows(table: str) -> list[dict[str, Any]]:
    """Return the rows of a device and a dtype, of the newest version of each way or of others."""
    device, dtype, *older = table.split()
    found = [
        row
        for row in read_rows("engines")
        if row["dtype"] == dtype and device in row["device"]
    ]
    newest: dict[str, dict[str, Any]] = {}
    for row in sorted(found, key=_version):
        newest[row["way"]] = row
    if older:
        found = [row for row in found if row is not newest[row["way"]]]
    else:
        found = list(newest.values())
    return sorted(
        found, key=lambda row: (list(ENGINES).index(_engine(row)), row["way"])
    )


def _version(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", row["version"])))


def _engine(row: dict[str, Any]) -> str:
    return str(row["way"].partition(":")[0])


def _head(row: dict[str, Any]) -> str:
    """Return the title of a column: engine, version, twin."""
    twin = row["way"].partition(":")[2].replace("+graphs", ", graphs")
    name = ENGINES[_engine(row)]
    if _engine(row) == "vllm" and not twin:
        twin = "its own backend"
    version = row["version"].partition(" ")[2]
    return f"{name} {version}".strip() + (f", {twin}" if twin else "")


def cell(row: dict[str, Any], family: str, alone: float = 0.0) -> str:
    """Return how the tokens of a family compare, or why there are none.

    Args:
        row: of a way.
        family: a row of the table.
        alone: the margin of transformers alone in the same dtype.
    """
    result = row["cells"].get(family, "not run")
    if isinstance(result, str):
        return result
    before, margin = result
    if before == row["tokens"]:
        return "equal"
    digits = 4 if row["dtype"] == "float32" else 2
    if margin > max(FAR[row["dtype"]], 1.5 * alone):
        return f"**other tokens**: {before}, {margin:.1f}"
    return f"{before}, {margin:.{digits}f}"


def family_table(table: str) -> str:
    """Return one row per family and one column per way, of a device and a dtype.

    Args:
        table: a device and a dtype, such as "cpu float32"; with "older" at the end, of the
            versions that are not the newest.
    """
    rows = _rows(table)
    if not rows:
        return NONE
    # every family, also of ways that ran some of them alone
    absent = [name for name in ABSENT if name not in map(_engine, rows)]
    if table.endswith("older"):
        absent = []
    families = list(dict.fromkeys(name for row in rows for name in row["cells"]))
    heads = [*map(_head, rows), *(ENGINES[name] for name in absent)]
    lines = [
        f"| family | {' | '.join(heads)} |",
        f"|---|{'---|' * len(heads)}",
    ]
    for family in families:
        results = [row["cells"].get(family) for row in rows if row["way"] == "plain"]
        alone = [result[1] for result in results if isinstance(result, list)]
        cells = [cell(row, family, max(alone, default=0.0)) for row in rows]
        cells += [ABSENT[name](family) for name in absent]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines)


def real_weights_table() -> str:
    """Return one row per way, device and dtype: tokens and perplexity of a trained model."""
    rows = read_rows("real_weights")
    if not rows:
        return NONE
    lines = [
        "| device, dtype | way | prompts equal to the end | tokens before the first difference |"
        " largest margin there | perplexity | largest difference of log-probabilities |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(
        rows,
        key=lambda row: (
            row["device"],
            row["dtype"],
            list(ENGINES).index(_engine(row)),
        ),
    ):
        device = row["device"].replace("NVIDIA ", "").replace("cpu", "CPU")
        first = [f"{device}, {row['dtype']}", _head(row)]
        if "error" in row:
            lines.append(f"| {' | '.join([*first, row['error']])} | | | | |")
            continue
        cells = [
            *first,
            f"{row['equal']} of {row['prompts']}",
            f"{row['before']:,} of {row['tokens']:,}",
            f"{max(row['margins'], default=0.0):.4f}",
            f"{row['perplexity']:.4f}" if "perplexity" in row else "",
            f"{row['logprob_difference_max']:.5f}" if "perplexity" in row else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
