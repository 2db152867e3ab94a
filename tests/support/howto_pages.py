"""How-to pages: their blocks are applied to a copy of the sources, and programs run there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEW_FILE = re.compile(r"^\| \d+ \| `([\w/<>]+\.py)` \| new", re.MULTILINE)
CHANGED_FILE = re.compile(r"^\| \d+ \| `([\w/.]+)` \| (?!new)", re.MULTILINE)
BLOCK = re.compile(r"^```(text|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def apply_page(name: str, folder: Path, placeholder: str, word: str, most: int) -> None:
    """Copy the sources to a folder, and apply the blocks of a page of docs/howto to the copy.

    Args:
        name: File of the page.
        folder: An empty folder.
        placeholder, word: What names of new files contain in the page's table, such as
            "<option>", and what takes its place.
        most: Number of files that the page may change and add.
    """
    page = (ROOT / "docs" / "howto" / name).read_text(encoding="utf-8")
    for copied in ("reference", "optimized", "shared", ".typing"):
        shutil.copytree(
            ROOT / copied,
            folder / copied,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(ROOT / "pyproject.toml", folder)
    blocks = [(match[1], match[2]) for match in BLOCK.finditer(page)]
    patch = "".join(text for kind, text in blocks if kind == "diff")
    subprocess.run(
        ["git", "apply", "-"],
        cwd=folder,
        input=patch,
        text=True,
        check=True,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)},
    )
    names = [new.replace(placeholder, word) for new in NEW_FILE.findall(page)]
    # an empty file has no block
    empty = [new for new in names if new.endswith("__init__.py")]
    texts = [*[""] * len(empty), *(text for kind, text in blocks if kind == "text")]
    for new, text in zip(
        sorted(names, key=empty.count, reverse=True), texts, strict=True
    ):
        (folder / new).parent.mkdir(exist_ok=True)
        (folder / new).write_text(text, encoding="utf-8")
    patched = re.findall(r"^\+\+\+ b/(.*)$", patch, re.MULTILINE)
    assert sorted(patched) == sorted(CHANGED_FILE.findall(page))
    count = len(names) + len(patched)
    assert f"**Files: {count}.**" in page
    assert count <= most


def run_in(copy: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the package of a copy, in Triton's interpreter."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=copy,
        env=os.environ
        | {"PYTHONPATH": str(copy / ".typing"), "TRITON_INTERPRET": "1"}
        | {"TRITON_CACHE_DIR": str(copy / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def change(copy: Path, name: str, old: str, new: str) -> None:
    """Replace a text that a file of a copy has once."""
    file = copy / name
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1
    file.write_text(text.replace(old, new), encoding="utf-8")
