"""Puzzles in the browser: the Python runtime, the puzzles on lists, and the list of them.

The runtime is Pyodide, a build of CPython for WebAssembly. A build of the site takes it from the
npm registry once, checks its digest and copies it into the site, so that the site needs no other
host.
Without a network the site is built without it, and its pages load it from PUBLIC_COPY.
"""

import base64
import hashlib
import html
import json
import logging
import os
import tarfile
import urllib.request
from functools import cache
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from typing import Any

from pagetwin.tools.puzzles import list_check
from pagetwin.tools.puzzles.list_form import list_forms

ROOT = Path(__file__).parents[2]
VERSION = "314.0.7"
ARCHIVE = f"https://registry.npmjs.org/pyodide/-/pyodide-{VERSION}.tgz"
DIGEST = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
"""SHA-512 of the archive in base64, as the registry names it."""
PUBLIC_COPY = f"https://cdn.jsdelivr.net/npm/pyodide@{VERSION}/"
CACHED = ROOT / ".cache" / f"pyodide-{VERSION}.tgz"
PARTS = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "pyodide-lock.json",
    "python_stdlib.zip",
)
SECONDS = 60
FOLDER = "python"
"""Folder of the site with everything that runs Python."""


@cache
def runtime() -> dict[str, bytes]:
    """Return the files of the runtime by name. Empty if the registry cannot be reached.

    Raises:
        ValueError: The archive is not the one that DIGEST names.
    """
    if not CACHED.exists():
        try:
            with urllib.request.urlopen(ARCHIVE, timeout=SECONDS) as reply:
                content = reply.read()
        except (OSError, HTTPException) as error:
            logging.getLogger("mkdocs").info(
                "the site has no Python of its own: %s: %s", ARCHIVE, error
            )
            return {}
        _check(content, ARCHIVE)
        CACHED.parent.mkdir(exist_ok=True)
        # a build that is interrupted leaves no part of the archive
        part = CACHED.with_suffix(f".{os.getpid()}")
        part.write_bytes(content)
        part.replace(CACHED)
    content = CACHED.read_bytes()
    _check(content, str(CACHED))
    with tarfile.open(fileobj=BytesIO(content)) as archive:
        found = {name: archive.extractfile(f"package/{name}") for name in PARTS}
        return {name: file.read() for name, file in found.items() if file is not None}


def _check(content: bytes, name: str) -> None:
    digest = base64.b64encode(hashlib.sha512(content).digest()).decode()
    if digest != DIGEST:
        raise ValueError(f"{name} has SHA-512 {digest}, expected {DIGEST}")


def python_files() -> dict[str, bytes | str]:
    """Return what the site holds beside its pages to run Python, by path."""
    source = Path(list_check.__file__).read_text(encoding="utf-8")
    files: dict[str, bytes | str] = {f"{FOLDER}/list_check.py": source}
    for puzzle in _forms()["puzzles"]:
        text = json.dumps(puzzle, separators=(",", ":"))
        # numbers that JSON does not have, such as NaN, are read by Python alone
        files[f"{FOLDER}/{puzzle['name']}.json"] = text
        files[f"{FOLDER}/{puzzle['name']}.txt"] = puzzle["template"]
    files |= {f"{FOLDER}/{name}": content for name, content in runtime().items()}
    return files


@cache
def _forms() -> dict[str, Any]:
    return list_forms()


def puzzle_editor() -> str:
    """Return the editor of puzzles. Its script fills it (js/puzzles.js)."""
    forms = _forms()
    options = [
        f'<option value="{puzzle["name"]}">{puzzle["number"]}. {html.escape(puzzle["title"])}'
        "</option>"
        for puzzle in forms["puzzles"]
    ]
    options += [
        f"<option disabled>{puzzle['number']}. {html.escape(puzzle['title'])}: in the terminal"
        "</option>"
        for puzzle in forms["terminal_only"]
    ]
    reasons = "; ".join(
        f"{puzzle['number']} stays in the terminal because {puzzle['reason']}"
        for puzzle in forms["terminal_only"]
    )
    files = runtime()
    size = sum(map(len, files.values())) / 1e6
    address = f"../{FOLDER}/" if files else PUBLIC_COPY
    source = f"this site ({size:.1f} MB)" if files else f"{PUBLIC_COPY} (about 13.5 MB)"
    return f"""<div class="py-editor" data-runtime="{address}" data-files="../{FOLDER}/" hidden>
<p><label>Puzzle <select class="py-choice">{"".join(options)}</select></label></p>
<textarea class="py-text" aria-label="Your answer" spellcheck="false" autocapitalize="off"
autocomplete="off" rows="24"></textarea>
<p><button class="md-button md-button--primary py-check">Check</button>
<button class="md-button py-reset">Begin anew</button></p>
<pre class="py-result" aria-live="polite" tabindex="0" hidden></pre>
</div>
<noscript><p>The editor needs JavaScript. The puzzles in the terminal do not.</p></noscript>

The first check loads Python (Pyodide, MPL-2.0, unchanged) from {source}. Nothing that you write
leaves your browser. Your answers are kept in it. Puzzle {reasons}.
"""
