"""Generated mutants of the kernels for Hopper."""

import ast
from collections.abc import Sequence
from pathlib import Path

from .digest import MUTANTS
from .generate import Generated, generate, read_reasons
from .mutant import ROOT

REASONS = MUTANTS / "hopper_equivalent.toml"


def hopper_mutants() -> list[Generated]:
    """Return all mutants that the Gluon interpreter can show."""
    return without_layouts(generate(hopper_files(), read_reasons(REASONS)))


def hopper_files() -> list[str]:
    """Return the files with functions that the Gluon interpreter runs."""
    folder = ROOT / "optimized/kernels/sm90"
    return [
        path.relative_to(ROOT).as_posix()
        for path in sorted(folder.rglob("*.py"))
        if any(
            f"@{library}.jit" in path.read_text("utf-8")
            for library in ("gluon", "triton")
        )
    ]


def folder_of(file: str) -> str:
    """Return the name of a file's folder, which is that of its kernels."""
    return Path(file).parent.name


def without_layouts(mutants: Sequence[Generated]) -> list[Generated]:
    """Return the mutants that change more than a layout of registers, which is not interpreted."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for file in {mutant.file for mutant in mutants}:
        text = (ROOT / file).read_bytes()
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        spans[file] = [
            (
                starts[node.lineno - 1] + node.col_offset,
                starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0),
            )
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Layout")
        ]
    return [
        mutant
        for mutant in mutants
        if not any(
            begin <= mutant.begin and mutant.end <= end
            for begin, end in spans[mutant.file]
        )
    ]
