"""Which laws are there, and what do the adapters look like?"""

import ast
from pathlib import Path

from pagetwin.shared.conformance.all_laws import ALL_LAWS
from pagetwin.shared.conformance.law import Law

ROOT = Path(__file__).parents[2]


def law_table() -> str:
    """Return every law by area: the question of its file, its sentence, what it needs."""
    areas: dict[str, list[Law]] = {}
    for law in ALL_LAWS:
        areas.setdefault(law.area, []).append(law)
    parts = [f"{len(ALL_LAWS)} laws about {len(areas)} things."]
    for area, laws in areas.items():
        parts.append(f"### {area.replace('_', ' ').capitalize()}")
        lines = ["| law | needs |", "|---|---|"]
        for law in laws:
            needs = ", ".join(f"`{name}`" for name in law.needs)
            lines.append(f"| {law.name} | {needs} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def adapter(name: str) -> str:
    """Return an adapter of docs/adapters: what it says first, and its code."""
    source = (ROOT / "docs" / "adapters" / f"{name}.py").read_text(encoding="utf-8")
    words = ast.get_docstring(ast.parse(source)) or ""
    code = source.partition('"""\n\n')[2]
    return f"{words.partition(chr(10) * 2)[2]}\n\n```python\n{code.rstrip()}\n```"
