"""What every test needs: a device, both twins with their shapes enforced, Hypothesis profiles."""

import os
import subprocess
import sys

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable, Iterator
from importlib import import_module
from inspect import isclass, isfunction
from pathlib import Path
from typing import Any

import pytest
from beartype import beartype
from hypothesis import HealthCheck, settings
from jaxtyping import jaxtyped
from pagetwin.conformance.harness.interpreter import speed_up
from pagetwin.contract.operations import CONCEPTS
from rank_processes import RankProcesses

ROOT = Path(__file__).parents[1]

INTERPRETER = "TRITON_INTERPRET"
CHOSEN_INTERPRETER = os.environ.get(INTERPRETER)

torch.set_num_threads(1)
speed_up()

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


GOLDEN_LINE = pytest.StashKey[str]()


QUICK: dict[str, str] = {
    "test_backends.py": "",
    "test_budgets.py": "",
    "test_cache_specs.py": "",
    "test_cli.py": "version or help",
    "test_golden.py": "",
    "test_host_calls.py": "",
    "test_imports.py": "",
    "test_laws.py": "the_reference or the_optimized",
    "test_layouts.py": "",
    "test_metadata_fields.py": "",
    "test_mutants.py": "catalogue or todays or equivalent",
    "test_option_pairs.py": "design or choice",
    "test_packed_sm90.py": "two_plans or box or map or warm_up_choose or fewer_tiles",
    "test_puzzles.py": "accepted or template or example or page or unknown",
    "test_twins.py": "",
    "test_validation.py": "",
    "test_versions.py": "",
    "test_vllm_contract.py": "",
    "test_words.py": "",
}
"""Tests of `make test-quick`: by file, one of these words in the name; empty: all of the file."""


LONG: dict[str, str] = {
    "test_bench.py": "smoke",
    "test_conformance.py": "workers or command_ends or crash",
    "test_fuzzing.py": "planted or minimised",
    "test_howto.py": "",
    "test_ladder.py": "",
    "test_mutants.py": "sample or trivial",
    "test_puzzles.py": "usual_mistake or loop",
    "test_rank_processes.py": "late or unusable or scatter",
}
"""Tests of `make test-long`: those that start many processes or try hundreds of variants."""


@pytest.fixture(scope="session")
def site() -> Path:
    """Build the documentation, and return its folder."""
    for each in ("mkdocs", "mkdocstrings", "material"):
        pytest.importorskip(each, reason="the docs extra is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return ROOT / "site"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without a quick test unread by `make test-quick`: imports take longer."""
    only_quick = config.option.markexpr.startswith("quick ")
    is_other = collection_path.suffix == ".py" and collection_path.name not in QUICK
    return True if only_quick and is_other else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `make test-long` and `make test-quick`: of laws, one per area and twin."""
    areas: set[tuple[str, str]] = set()
    for item in items:
        if _is_listed(item, LONG):
            item.add_marker("long")
        elif _is_listed(item, QUICK):
            if item.path.name == "test_laws.py":
                law = item.callspec.params["law"].law  # type: ignore[attr-defined]
                one = item.name.partition("[")[0], law.area
                if one in areas:
                    continue
                areas.add(one)
            item.add_marker("quick")


def _is_listed(item: pytest.Item, tests: dict[str, str]) -> bool:
    words = tests.get(item.path.name)
    return words is not None and any(each in item.name for each in words.split(" or "))


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


def enforced(operation: Any) -> Any:
    """Return an operation that holds its annotations; of a class, each public method does."""
    if not isclass(operation):
        return jaxtyped(operation, typechecker=beartype)
    methods = {
        name: jaxtyped(method, typechecker=beartype)
        for name, method in vars(operation).items()
        if isfunction(method) and (name == "__init__" or name[0] != "_")
    }
    return type(operation.__name__, (operation,), methods)


class Twin:
    """Every public operation of one twin, as an attribute, with its annotations enforced.

    Args:
        name: "reference" or "optimized".
        enforce: whether shapes and dtypes are held against the annotations. A test of a refusal
            wants to see the operation's own error, and so goes to `raw`.
    """

    def __init__(self, name: str, enforce: bool = True) -> None:
        self.name = name
        self._enforce = enforce
        self._operations: dict[str, Callable[..., Any]] = {}
        self.raw = Twin(name, enforce=False) if enforce else self

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        if operation in self._operations:
            return self._operations[operation]
        for concept in CONCEPTS:
            if operation in concept.operations:
                function = getattr(import_module(f"pagetwin.{self.name}"), operation)
                if self._enforce:
                    function = enforced(function)
                self._operations[operation] = function
                return function
        raise AttributeError(f"{operation!r} is not one of pagetwin's operations")

    def __repr__(self) -> str:
        return self.name


TWINS = {name: Twin(name) for name in ("reference", "optimized")}


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
    split_k = import_module("pagetwin.optimized.launch.xformers_split_k")
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
    for name in ("launch.prepare", "kernels.sm90.fp8_prefill.family"):
        module = import_module(f"pagetwin.optimized.{name}")
        monkeypatch.setattr(module, "has_native_fp8", lambda device: False)


@pytest.fixture
def checked_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the twin read contents too, as the reference always does."""
    monkeypatch.setenv("PAGETWIN_CHECK_VALUES", "1")


@pytest.fixture
def report_lines(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Return a function whose lines stand in the terminal's summary."""

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
            f" {golden.count('deviated')} deviated"
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say last how the recorded cases went."""
    if line := config.stash.get(GOLDEN_LINE, None):
        print(line)
