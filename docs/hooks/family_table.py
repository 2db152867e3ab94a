"""Tables of engines and families of models, and of one trained model, from their records.

`tests/gpu/serving/engine_table.py` compares the tokens.
"""

from typing import Any

from page_data import read_rows

NONE = "No record."
FAR = 0.5
"""Logits. Rounding to bfloat16 moves them less; a larger margin is that of other attention."""
ENGINES = {
    "plain": "transformers alone",
    "transformers": "transformers, `generate`",
    "continuous": "transformers, continuous batching",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "nano": "nano-vllm",
}
"""The columns of every table, from a way of the record without its twin."""
REASONS = (
    ("continuous", "it has no encoder", "no encoder"),
    ("continuous", "must have same slice shapes", "two head sizes"),
    ("vllm", "was supported in vLLM until", "no such model"),
    ("vllm", "Argument position_ids not found", "no such model"),
    ("nano", "has Qwen3 alone", "Qwen3 alone"),
    ("transformers", "computes its own attention", "own attention"),
)
"""An engine, words of its error, and the cell."""


def _rows(table: str) -> list[dict[str, Any]]:
    """Return the rows of a device and a dtype, such as "cpu float32"."""
    device, dtype = table.rsplit(" ", 1)
    found = [
        row
        for row in read_rows("engines")
        if row["dtype"] == dtype and device in row["device"]
    ]

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        return list(ENGINES).index(_engine(row)), row["way"], row["version"]

    return sorted(found, key=place)


def _engine(row: dict[str, Any]) -> str:
    return str(row["way"].partition(":")[0])


def _head(row: dict[str, Any]) -> str:
    """Return the title of a column: engine, version, twin."""
    twin = row["way"].partition(":")[2].replace("+graphs", ", graphs")
    name = ENGINES[_engine(row)]
    if _engine(row) == "vllm" and not twin:
        twin = "its own backend"
    version = row["version"].split()[-1]
    return f"{name} {version}" + (f", {twin}" if twin else "")


def cell(row: dict[str, Any], family: str) -> str:
    """Return how the tokens of a family compare, or why there are none."""
    result = row["cells"].get(family, "not run")
    if isinstance(result, str):
        for engine, words, shown in REASONS:
            if engine == _engine(row) and words in result:
                return shown
        return result
    before, margin = result
    if before == row["tokens"]:
        return "equal"
    if margin > FAR:
        return f"**other tokens**: {before}, {margin:.1f}"
    digits = 4 if row["dtype"] == "float32" else 2
    return f"{before}, {margin:.{digits}f}"


def family_table(table: str) -> str:
    """Return one row per family and one column per way, of a device and a dtype.

    Args:
        table: a device and a dtype, such as "cpu float32".
    """
    rows = _rows(table)
    if not rows:
        return NONE
    # every family, also of ways that ran some of them alone
    families = list(dict.fromkeys(name for row in rows for name in row["cells"]))
    lines = [
        f"| family | {' | '.join(map(_head, rows))} |",
        f"|---|{'---|' * len(rows)}",
    ]
    for family in families:
        cells = [cell(row, family) for row in rows]
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
