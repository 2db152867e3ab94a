"""The quick tests on each declared combination of versions; writes docs/data/versions.json.

    python tests/structure/version_matrix.py [--workers N] [--cuda-builds] [CORNER ...]

Each corner has an environment of its own in .matrix/. A corner that cannot be installed here is
recorded with the reason, unless it was run elsewhere. A corner that fails does not end the run.
Corners that are not run keep their entry. The table of docs/install.md is made from the record.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.markup import escape
from rich.table import Table

sys.path.append(str(Path(__file__).parents[2] / "docs" / "hooks"))

from page_data import DATA, entry_lines

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".matrix"
RECORD = DATA / "versions.json"
PACKAGES = ("torch", "triton", "numpy", "xformers")
MINUTES = 60
"""Limit of one corner's tests."""


@dataclass(frozen=True)
class Corner:
    """One combination of versions.

    Args:
        name: unique; the corner's environment is .matrix/<name>.
        python: major and minor version.
        torch, triton: versions that pip accepts after "==".
        numpy: a requirement without the name.
        xformers: whether xFormers is installed.
        wheel: whether the wheel is installed without triton and xFormers, and imported, instead of
            the tests.
        meaning: why it is declared.
    """

    name: str
    python: str
    torch: str
    triton: str
    numpy: str
    xformers: bool
    meaning: str
    wheel: bool = False


OLD_NUMPY, NEW_NUMPY = "==2.0.*", ">=2.4"
CORNERS = (
    Corner("oldest", "3.10", "2.10.*", "3.6.*", OLD_NUMPY, True, "the oldest of each"),
    Corner("torch-2.11", "3.12", "2.11.*", "3.6.*", NEW_NUMPY, True, "triton 3.6 with new numpy"),
    Corner("torch-2.13", "3.11", "2.13.*", "3.7.*", NEW_NUMPY, True, "what `make` installs"),
    Corner("torch-2.14", "3.12", "2.14.*", "3.8.*", NEW_NUMPY, True, "the newest with xFormers"),
    Corner("newest", "3.13", "2.15.*", "3.9.*", NEW_NUMPY, False, "the newest of each"),
    Corner("python-3.14", "3.14", "2.15.*", "3.9.*", NEW_NUMPY, False, "the newest Python"),
    # a CPU build of torch requires no triton, so it runs with each of them
    Corner("cpu-3.6", "3.11", "2.13.*", "3.6.*", NEW_NUMPY, True, "CPU build, oldest triton"),
    Corner("cpu-3.8", "3.11", "2.13.*", "3.8.*", NEW_NUMPY, True, "CPU build, triton 3.8"),
    Corner("cpu-3.9", "3.11", "2.13.*", "3.9.*", NEW_NUMPY, False, "CPU build, newest triton"),
    Corner("cpu-numpy-2.0", "3.11", "2.13.*", "3.6.*", OLD_NUMPY, True, "CPU build, oldest numpy"),
    Corner("wheel", "3.11", "2.13.*", "", NEW_NUMPY, False, "the wheel without triton", True),
)  # fmt: skip

IMPORTS = """
import pagetwin.reference as reference
assert reference.blocks_needed(9, 4) == 3
try:
    import pagetwin.optimized
except ImportError as error:
    text = str(error)
assert text.startswith("pagetwin.optimized needs triton ") and "\\n" not in text, text
from pagetwin.engine.selector import backend_names
assert backend_names() == ["REFERENCE"], backend_names()
print(text)
"""
"""What must hold where neither triton nor xFormers is installed."""


class NotInstalled(Exception):
    """The corner cannot be installed on this machine; the message is the reason."""


def find_python(version: str) -> str:
    """Return the interpreter of that version: on the path, else one of pyenv's.

    Raises:
        NotInstalled: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}")]
    candidates += [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for candidate in candidates:
        if candidate and not _failure([candidate, "-c", "import ensurepip, venv"]):
            return candidate
    raise NotInstalled(f"Python {version} is not on this machine")


def _failure(command: Sequence[str | Path], **options: Any) -> str:
    """Run a command. Return the last line of its errors, or "" if it succeeds."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, **options
    )
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
    return (lines or done.stderr.splitlines() or ["no message"])[-1].strip()


def install(corner: Corner, cuda_builds: bool) -> Path:
    """Install a corner. Return its Python interpreter.

    Raises:
        NotInstalled: no such interpreter or versions, or a CUDA build that was not asked for.
    """
    python = FOLDER / corner.name / "bin" / "python"
    if not python.exists():
        if error := _failure(
            [find_python(corner.python), "-m", "venv", python.parents[1]]
        ):
            raise NotInstalled(error)
        # the pip of Python 3.10 and 3.11 cannot make a report
        _failure([python, "-m", "pip", "install", "-q", "--upgrade", "pip"])
    versions = [f"torch=={corner.torch}", f"numpy{corner.numpy}"]
    if corner.wheel:
        wanted = [*versions, "jaxtyping>=0.3", "rich>=13", "typer>=0.15"]
    else:
        extras = "test,xformers" if corner.xformers else "test"
        wanted = [*versions, f"triton=={corner.triton}", "-e", f"{ROOT}[{extras}]"]
    pip = [python, "-m", "pip", "install", "-q", "--no-cache-dir"]
    report = FOLDER / f"{corner.name}.json"
    if error := _failure([*pip, "--dry-run", "--report", report, *wanted]):
        raise NotInstalled(error)
    found = json.loads(report.read_text(encoding="utf-8"))["install"]
    names = [installed["metadata"]["name"] for installed in found]
    cuda = [name for name in names if name.startswith(("nvidia-", "cuda-"))]
    if cuda and not cuda_builds:
        raise NotInstalled(
            f"torch {corner.torch.rstrip('.*')} for Python {corner.python} is on this index only"
            f" as a CUDA build with {len(cuda)} more packages; CUDA_BUILDS=1 installs it"
        )
    if error := _failure([*pip, *wanted]):
        raise NotInstalled(error)
    if corner.wheel:
        shutil.rmtree(FOLDER / "dist", ignore_errors=True)
        build = [
            python,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "-w",
            FOLDER / "dist",
            ROOT,
        ]
        if error := _failure(build):
            raise NotInstalled(error)
        (wheel,) = (FOLDER / "dist").glob("*.whl")
        # a CUDA build of torch requires triton
        _failure([python, "-m", "pip", "uninstall", "-q", "-y", "triton", "pagetwin"])
        if error := _failure([*pip, "--no-deps", wheel]):
            raise NotInstalled(error)
    return python


def installed_versions(python: Path) -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    program = (
        "import json, platform\nfrom importlib.metadata import version, PackageNotFoundError\n"
        "found = {'python': platform.python_version()}\n"
        f"for package in {PACKAGES}:\n"
        "    try: found[package] = version(package)\n"
        "    except PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run(
        [python, "-c", program], capture_output=True, text=True, check=True
    )
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def run_tests(python: Path, corner: Corner, workers: int) -> dict[str, Any]:
    """Return the counts of the quick tests, and the names of those that failed."""
    report = FOLDER / f"{corner.name}.xml"
    report.unlink(missing_ok=True)
    # the interpreter, also beside a GPU: the compiled kernels have records of their own
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["OMP_NUM_THREADS"] = "1"
    environment.pop("PYTHONPATH", None)
    command = [
        *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "quick and not slow"),
        *(("-n", str(workers)) if workers > 1 else ()),
        # whether records are of today's sources does not depend on the versions
        *("-k", "not the_record_is"),
        f"--junit-xml={report}",
    ]  # fmt: skip
    with (FOLDER / f"{corner.name}.log").open("w") as log:
        try:
            subprocess.run(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log,
                timeout=60 * MINUTES, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"failures": [f"the tests did not end within {MINUTES} minutes"]}
    if not report.exists():
        return {"failures": [f"pytest wrote no report; see .matrix/{corner.name}.log"]}
    return read_report(report)


def read_report(report: Path) -> dict[str, Any]:
    """Return the counts of a JUnit report, and the names of the tests that failed."""
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    kinds = ("tests", "failures", "errors", "skipped")
    counts = {kind: int(suite.get(kind, "0")) for kind in kinds}
    failed = counts["failures"] + counts["errors"]
    return {
        "passed": counts["tests"] - failed - counts["skipped"],
        "failed": failed,
        "skipped": counts["skipped"],
        "failures": [
            f"{case.get('classname')}::{case.get('name')}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ],
    }


def check_wheel(python: Path) -> dict[str, Any]:
    """Return whether the installed wheel imports, as counts of one test."""
    error = _failure([python, "-c", IMPORTS], cwd=FOLDER)
    return {
        "passed": int(not error),
        "failed": int(bool(error)),
        "skipped": 0,
        "failures": [error] if error else [],
    }


def run(corner: Corner, workers: int, cuda_builds: bool) -> dict[str, Any]:
    """Install and test one corner. Return its entry of the record."""
    entry: dict[str, Any] = {**asdict(corner), "date": date.today().isoformat()}
    begin = time.monotonic()
    try:
        python = install(corner, cuda_builds)
    except NotInstalled as reason:
        # the machine's folders are of no use in a record
        return {**entry, "reason": re.sub(r"(?:file:)?/\S+", "...", str(reason))}
    entry["versions"] = installed_versions(python)
    found = check_wheel(python) if corner.wheel else run_tests(python, corner, workers)
    return {**entry, **found, "seconds": round(time.monotonic() - begin)}


def rows(entries: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield a row per corner: name, versions, what ran, the result."""
    for entry in entries:
        if "reason" in entry:
            asked = [
                entry["python"],
                *(entry[package].rstrip(".*") for package in PACKAGES[:2]),
            ]
            yield entry["name"], *asked, entry["numpy"], "", "not run", entry["reason"]
            continue
        versions = [
            entry["versions"].get(package, "-") for package in ("python", *PACKAGES)
        ]
        counts = [
            f"{entry.get(outcome, 0)} {outcome}"
            for outcome in ("passed", "failed", "skipped")
        ]
        yield (
            entry["name"],
            *versions,
            ", ".join(counts),
            "; ".join(entry["failures"][:3]),
        )


def show(entries: Sequence[dict[str, Any]]) -> None:
    """Print the table of all corners."""
    table = Table("corner", "Python", *PACKAGES, "result", "reason or first failures")
    for row in rows(entries):
        table.add_row(*map(escape, row))
    Console(width=160).print(table)


def main() -> int:
    """Run the corners. Return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1, help="processes per corner")
    parser.add_argument(
        "--cuda-builds", action="store_true", help="also install CUDA builds of torch"
    )
    parser.add_argument(
        "corners", nargs="*", metavar="CORNER", help="names; all if none"
    )
    arguments = parser.parse_args()
    names = [corner.name for corner in CORNERS]
    if unknown := set(arguments.corners) - set(names):
        parser.error(f"unknown corner {unknown.pop()!r}: expected {', '.join(names)}")
    FOLDER.mkdir(exist_ok=True)
    chosen = [
        corner for corner in CORNERS if corner.name in (arguments.corners or names)
    ]
    ran = []
    for corner in chosen:
        print(f"{corner.name}: {corner.meaning}", flush=True)
        ran.append(run(corner, arguments.workers, arguments.cuda_builds))
        # read anew: another run may have written its corners
        record: dict[str, Any] = {}
        if RECORD.exists():
            record = json.loads(RECORD.read_text(encoding="utf-8"))["corners"]
        if "reason" not in ran[-1] or "versions" not in record.get(corner.name, {}):
            record[corner.name] = ran[-1]
        kept = {name: record[name] for name in names if name in record}
        RECORD.write_text(entry_lines({"corners": kept}), encoding="utf-8")
    show(ran)
    return int(any(entry.get("failures") for entry in ran))


if __name__ == "__main__":
    sys.exit(main())
