"""Table of the operations that are operators of torch, with what each one writes."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def operator_table() -> str:
    """Return one row per operator: its name, what it always writes, what it writes if given."""
    lines = ["| operator | always writes | writes if given |", "|---|---|---|"]
    for path in sorted((ROOT / "optimized").rglob("[!_]*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for call in node.decorator_list:
                if (
                    not isinstance(call, ast.Call)
                    or ast.unparse(call.func) != "operator"
                ):
                    continue
                keywords = {keyword.arg: keyword.value for keyword in call.keywords}
                changed, out = (
                    ", ".join(f"`{name}`" for name in ast.literal_eval(keywords[key]))
                    if key in keywords
                    else "-"
                    for key in ("changed", "out")
                )
                lines.append(f"| `{node.name}` | {changed} | {out} |")
    if len(lines) == 2:
        raise ValueError("optimized/: no function has the decorator `operator`")
    return "\n".join(lines)
