"""What every test needs: a device, both twins with their shapes enforced, Hypothesis profiles."""

import gc
import os
import re
import subprocess
import sys

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# most adapters of the tests wrap the reference; those that do not ask for `guarded_calls`
os.environ.setdefault("PAGETWIN_GUARD_CALLS", "0")
# a tuning file of the user would change which kernels are tested
os.environ["PAGETWIN_TUNING"] = "off"

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from pagetwin.conformance.candidates.guard.global_modes import (
    MODES,
    read_modes,
    restore_modes,
)
from pagetwin.conformance.running.interpreter import speed_up
from support.log_capture import LogCapture
from support.rank_processes import RankProcesses
from support.twins import TWINS, Twin

ROOT = Path(__file__).parents[1]
MARK_OF_FILE = re.compile(r"^pytestmark = (?:\[\s*)?pytest\.mark\.(\w+)", re.MULTILINE)
"""The text of a file whose tests all have a marker."""
MARKS_OF_FILES = {
    "quick ": re.compile(r"mark\.quick\b"),
    "(long or extended)": re.compile(r"mark\.(long|extended|sample)\b"),
    "compile": re.compile(
        r"^(@|pytestmark = (\[\s*)?)pytest\.mark\.compile\b", re.MULTILINE
    ),
}
"""The text of the files that have tests of `make test-quick`, of `make test-long` and of `make
compile`, by the beginning of the expression of markers."""

INTERPRETER = "TRITON_INTERPRET"
CHOSEN_INTERPRETER = os.environ.get(INTERPRETER)

torch.set_num_threads(1)
speed_up()
# few objects of imports and of interpreted kernels are garbage: this saves 5 % of the CPU time
gc.set_threshold(100_000, 20, 100)

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,  # the interpreter's first launch of a kernel takes seconds
    print_blob=True,
    max_examples=36,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "dev", settings.get_profile("ci"), derandomize=False, max_examples=300
)
# compiled kernels: each new shape costs a compilation of about a second
settings.register_profile("cuda", settings.get_profile("ci"), max_examples=12)
DEFAULT_PROFILE = "cuda" if torch.cuda.is_available() else "ci"
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", DEFAULT_PROFILE))


@pytest.fixture
def caplog() -> Iterator[LogCapture]:
    """Capture log messages; pytest's own plugin is off (`support/log_capture.py`)."""
    with LogCapture().attached() as capture:
        yield capture


@pytest.fixture(autouse=True)
def global_modes_as_before() -> Iterator[None]:
    """Blame the test that leaves a global mode set, not the tests that come after it."""
    before, errors = read_modes(), np.geterr()
    yield
    changed = [
        mode.name
        for mode, old, new in zip(MODES, before, read_modes(), strict=True)
        if old != new and mode.name != "the seed"
    ]
    if np.geterr() != errors:
        changed.append("NumPy's errors")
    restore_modes(before)
    np.seterr(**errors)
    assert not changed


@pytest.fixture
def guarded_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard the calls of adapters, as the commands do."""
    monkeypatch.delenv("PAGETWIN_GUARD_CALLS")


GOLDEN_LINE = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def site() -> Path:
    """Build the documentation, and return its folder."""
    for library in ("mkdocs", "mkdocstrings", "material"):
        pytest.importorskip(library, reason="the docs extra is not installed")
    done = subprocess.run(
        # not quiet: mkdocs would drop the warnings before it counts them
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return ROOT / "site"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files unread that have no test to run: imports take longer."""
    if collection_path.suffix != ".py" or collection_path.stem == "conftest":
        return None
    marks = config.option.markexpr
    for begin, has_tests in MARKS_OF_FILES.items():
        if marks.startswith(begin):
            text = collection_path.read_text("utf-8")
            return None if has_tests.search(text) else True
    found = MARK_OF_FILE.search(collection_path.read_text("utf-8"))
    return True if found and f"not {found[1]}" in marks else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    items: list[pytest.Item], config: pytest.Config
) -> None:
    """Leave most cases of each test with `mark.sample` to `make test-long`.

    Tests with `mark.cuda` are left out without a GPU: a thousand skips take seconds.
    `make test` runs as many as the marker says, at equal steps of the list, on each twin. If the
    marker has `per`, a function of the test's parameters, it runs as many per result.
    """
    if not torch.cuda.is_available():
        on_gpus = [item for item in items if item.get_closest_marker("cuda")]
        config.hook.pytest_deselected(items=on_gpus)
        items[:] = [item for item in items if not item.get_closest_marker("cuda")]
    groups: dict[tuple[Any, ...], list[pytest.Item]] = {}
    for item in items:
        if mark := item.get_closest_marker("sample"):
            given = item.callspec.params  # type: ignore[attr-defined]
            key = (
                given.get("twin")
                if "per" not in mark.kwargs
                else mark.kwargs["per"](given)
            )
            test = item.nodeid.partition("[")[0]
            groups.setdefault((test, mark.args[0], key), []).append(item)
    for (_, number, _), cases in groups.items():
        kept = {index * len(cases) // number for index in range(number)}
        for index, case in enumerate(cases):
            if index not in kept:
                case.add_marker("extended")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the recorded cases come from another folder."""
    parser.addoption("--golden-dir", help="folder of recorded cases (tests/golden)")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `quick`, and filter warnings of triton and xFormers."""
    config.addinivalue_line("markers", "quick: run by `make test-quick`")
    for warning in (
        "ignore:tl.make_block_ptr is deprecated",
        "ignore:warmup, rep, and use_cuda_graph parameters are deprecated",
        "ignore::RuntimeWarning:triton.runtime.interpreter",
    ):
        config.addinivalue_line("filterwarnings", warning)


@pytest.fixture(scope="session", params=TWINS)
def twin(request: pytest.FixtureRequest) -> Twin:
    """Return each twin in turn."""
    return TWINS[request.param]


@pytest.fixture(scope="session")
def reference() -> Twin:
    """Return the reference, to hold something against."""
    return TWINS["reference"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return where the kernels run: CUDA if there is one, else the interpreter's CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    """Return eight processes for all tests of a file."""
    found = RankProcesses(tmp_path_factory.mktemp("ranks"), 8)
    yield found
    found.close()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[RankProcesses]:
    """Return three processes, whose group does not survive the test."""
    found = RankProcesses(tmp_path, 3)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def same_interpreter() -> Iterator[None]:
    """Fail if an import or a test changes how kernels run: those defined later would differ."""
    _expect_interpreter("an import of a test file or a fixture")
    yield
    _expect_interpreter("the test")


def _expect_interpreter(changed_by: str) -> None:
    found = os.environ.pop(INTERPRETER, None)
    if CHOSEN_INTERPRETER is not None:
        os.environ[INTERPRETER] = CHOSEN_INTERPRETER
    assert found == CHOSEN_INTERPRETER, (
        f"{changed_by} left {INTERPRETER} = {found!r}: expected {CHOSEN_INTERPRETER!r},"
        " as at the start; set it with monkeypatch or in a process of its own"
    )


@pytest.fixture(scope="session")
def xformers() -> None:
    """Skip the test, with the reason, where the optimized twin cannot use xFormers."""
    split_k = import_module("pagetwin.optimized.backends.xformers_split_k")
    if reasons := split_k.why_no_xformers():
        pytest.skip(reasons[0])


@pytest.fixture
def installed(request: pytest.FixtureRequest) -> None:
    """Skip what runs in xFormers where it is not installed."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and "XFORMERS" in callspec.params.values():
        request.getfixturevalue("xformers")


@pytest.fixture
def without_native_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls with tensors on the host be planned beside a GPU: the host is not a chip."""
    for name in (
        "kernels.portable.host.make_launches",
        "kernels.sm90.code_prefill.launcher",
    ):
        module = import_module(f"pagetwin.optimized.{name}")
        monkeypatch.setattr(module, "has_native_fp8", lambda device: False)


@pytest.fixture
def checked_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the twin read contents too, as the reference always does."""
    monkeypatch.setenv("PAGETWIN_CHECK_VALUES", "1")


@pytest.fixture
def unchecked_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the twin read no contents on the host either, as it does on a GPU."""
    monkeypatch.setenv("PAGETWIN_CHECK_VALUES", "0")


@pytest.fixture
def report_lines(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Return a function whose lines are in the terminal's summary."""

    def add(line: str) -> None:
        record_property("report_line", line)

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the lines that tests reported, such as each kernel's registers and spills."""
    lines = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "report_line"
    ]
    if lines:
        terminalreporter.write_sep("-", "reported by the tests")
        for line in lines:
            terminalreporter.write_line(str(line))
    golden = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "golden"
    ]
    failed = [
        report
        for report in terminalreporter.stats.get("failed", [])
        if "test_golden.py::test_case" in report.nodeid
    ]
    if golden or failed:
        terminalreporter.config.stash[GOLDEN_LINE] = (
            f"golden: {golden.count('equal')} passed, {len(failed)} failed,"
            f" {golden.count('deviated')} deviated,"
            f" {golden.count('not tried')} not tried"
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say last how the recorded cases went."""
    if line := config.stash.get(GOLDEN_LINE, None):
        print(line)
