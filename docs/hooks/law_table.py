"""Tables of the laws, and the code of the adapters."""

import ast
from functools import cache
from pathlib import Path

from bugs.page import law_id
from pagetwin.conformance import check_implementation
from pagetwin.conformance.flashinfer_bench.definitions import Definition
from pagetwin.conformance.flashinfer_bench.families import FAMILIES
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.conformance.laws.law import Law

ROOT = Path(__file__).parents[2]


def law_table() -> str:
    """Return every law by area: its sentence, and the operations and claims that it needs."""
    areas: dict[str, list[Law]] = {}
    for law in ALL_LAWS:
        areas.setdefault(law.area, []).append(law)
    parts = [f"{len(ALL_LAWS)} laws in {len(areas)} areas."]
    for area, laws in areas.items():
        parts.append(f"### {area.replace('_', ' ').capitalize()}")
        lines = ["| law | needs |", "|---|---|"]
        for law in laws:
            needs = ", ".join(f"`{name}`" for name in law.needs)
            if law.claim is not None:
                needs += f"; *{law.claim.replace('_', ' ')}*"
            anchor = f'<a id="{law_id(law.name)}"></a>'
            lines.append(f"| {anchor}{law.name} | {needs} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


@cache
def count_of(name: str) -> str:
    """Return the last line of a check of an adapter of docs/adapters, run at build time.

    Raises:
        AssertionError: A law is broken, but the page says that none is.
    """
    file = ROOT / "docs" / "adapters" / f"{name}.py"
    report = check_implementation(str(file), isolated=False, device="cpu")
    assert report.ok, report.to_markdown()
    counts = ", ".join(f"{count} {status}" for status, count in report.counts().items())
    return f"```\nmy_kernels on cpu: {counts}.\n```"


def solution(name: str) -> str:
    """Return a file of docs/solutions."""
    source = (ROOT / "docs" / "solutions" / f"{name}.py").read_text(encoding="utf-8")
    return f"```python\n{source.rstrip()}\n```"


def definition_table() -> str:
    """Return a table of the families of definitions of FlashInfer-Bench."""
    lines = ["| name | inputs | operation |", "|---|---|---|"]
    for family in FAMILIES:
        definition = Definition(family, (2,) * len(family.constants))
        inputs = ", ".join(f"`{name}`" for name in definition.inputs)
        lines.append(f"| `{family.pattern}` | {inputs} | `{family.operation}` |")
    return "\n".join(lines)


def adapter(name: str) -> str:
    """Return an adapter of docs/adapters: its docstring and its code."""
    source = (ROOT / "docs" / "adapters" / f"{name}.py").read_text(encoding="utf-8")
    words = ast.get_docstring(ast.parse(source)) or ""
    code = source.partition('"""\n\n')[2]
    return f"{words.partition(chr(10) * 2)[2]}\n\n```python\n{code.rstrip()}\n```"
