"""Versions of torch, triton, numpy and xFormers: declared, repaired, rejected and tested."""

import json
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import triton
import triton.language as tl
import version_matrix
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.contract import tested_versions
from pagetwin.engine import triton_versions
from pagetwin.engine.triton_versions import repair_interpreter, why_no_triton
from pagetwin.optimized.backends.xformers_split_k import FITS
from pagetwin.optimized.runtime.launcher import Launcher, check_launch
from pagetwin.tools import conformance_commands
from pagetwin.tools.cli import app
from typer.testing import CliRunner
from version_matrix import CORNERS, NotInstalled

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project() -> dict[str, Any]:
    """Return the project's declarations."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        declared: dict[str, Any] = tomllib.load(file)["project"]
    return declared


# ---- what is declared


def test_sentences_and_declarations_name_the_same_versions(
    project: dict[str, Any],
) -> None:
    (declared,) = project["optional-dependencies"]["triton"]
    assert declared.startswith("triton>=3.6;")
    pairs = tested_versions.TRITON_OF_TORCH
    torches, tritons = (
        [f"{major}.{minor}" for major, minor in sorted(found)]
        for found in (pairs, pairs.values())
    )
    assert f"{torches[0]} to {torches[-1]}" == tested_versions.TORCH_RANGE
    assert f"{tritons[0]} to {tritons[-1]}" == tested_versions.TRITON_RANGE
    corners = {(corner.torch, corner.triton) for corner in CORNERS}
    assert {("2.10.*", "3.6.*"), ("2.15.*", "3.9.*")} <= corners
    for machine in triton_versions.MACHINES:
        assert f"platform_machine == '{machine}'" in declared
    extra = project["optional-dependencies"]["xformers"]
    assert {requirement.partition(";")[0] for requirement in extra} == {
        "xformers==0.0.35",
        "torch<2.15",
        "triton<3.9",
    }
    assert "xformers 0.0.35 with torch 2.10 to 2.14 and triton 3.6 to 3.8" in FITS


def wheel(folder: Path, name: str, version: str, *lines: str) -> Path:
    """Write a wheel that has nothing but its metadata, and return its path."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    inner = f"{name}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines]
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{inner}/METADATA", "\n".join(metadata) + "\n")
        file.writestr(f"{inner}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        file.writestr(f"{inner}/RECORD", "")
    return path


def required(project: dict[str, Any]) -> list[str]:
    """Return the metadata of the dependencies that the project declares."""
    lines = [f"Requires-Dist: {line}" for line in project["dependencies"]]
    for extra, declared in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        for line in declared:
            name, _, marker = line.partition(";")
            condition = f"({marker.strip()}) and " if marker else ""
            lines.append(f'Requires-Dist: {name}; {condition}extra == "{extra}"')
    return lines


def test_ci_runs_each_declared_python_and_each_system() -> None:
    yaml = pytest.importorskip("yaml", reason="the docs extra is not installed")
    text = (ROOT / ".github/workflows/ci.yml").read_text("utf-8")
    jobs = {
        name: job["strategy"]["matrix"]
        for name, job in yaml.safe_load(text)["jobs"].items()
        if "strategy" in job
    }
    places = jobs["platforms"]["include"]
    systems = {place["os"].partition("-")[0] for place in places}
    assert systems == {"macos", "windows", "ubuntu"}
    assert any(place["os"].endswith("-arm") for place in places)
    pythons = {*jobs["tests"]["python"], *(place["python"] for place in places)}
    assert pythons == {corner.python for corner in CORNERS}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("torch", "triton"), [("2.9.1", "3.5.1"), ("2.16.0", "3.10.0")]
)
def test_an_installed_torch_stays(
    project: dict[str, Any], tmp_path: Path, torch: str, triton: str
) -> None:
    """Bounds of torch and triton replaced the torch of those who installed the suite.

    pip resolves without an index: it finds other versions in a folder, and must not take them.
    """
    pytest.importorskip("pip")
    own = wheel(tmp_path, "pagetwin", "0.1.0", *required(project))
    for version, its_triton in (
        ("2.9.1", "3.5.1"),
        ("2.13.0", "3.7.1"),
        ("2.16.0", "3.10.0"),
    ):
        wheel(tmp_path, "torch", version, f"Requires-Dist: triton=={its_triton}")
        wheel(tmp_path, "triton", its_triton)
    site = tmp_path / "site"
    for name, version in (("torch", torch), ("triton", triton)):
        with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl") as file:
            file.extractall(site)
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--no-index"),
            *("--find-links", tmp_path, "--report", report, f"{own}[pytest]"),
        ],
        env=os.environ | {"PYTHONPATH": str(site), "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    moved = {
        found["metadata"]["name"] for found in json.loads(report.read_text())["install"]
    }
    assert not moved & {"torch", "triton"}, moved


def install_versions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.setattr(
        tested_versions, "installed", lambda name: versions.get(name, "")
    )
    is_cuda = "+cpu" not in versions.get("torch", "")
    needs = (
        ["numpy", "triton==3.7.1; platform_system == 'Linux'"] if is_cuda else ["numpy"]
    )
    monkeypatch.setattr(tested_versions, "requires", lambda name: needs)


@pytest.mark.parametrize(
    ("torch", "triton", "sentence"),
    [
        ("2.13.0", "3.7.1", ""),
        ("2.13.0+cpu", "3.9.0", ""),
        ("2.13.0+cpu", "", ""),
        ("", "3.9.0", ""),
        (
            "2.9.1",
            "3.5.1",
            "torch 2.9.1 is installed, and pagetwin was tested with torch 2.10",
        ),
        (
            "2.16.0.dev3",
            "3.10",
            "torch 2.16.0.dev3 is installed, and pagetwin was tested",
        ),
        ("2.15.0+cpu", "3.10.0", "triton 3.10.0 is installed, and pagetwin was tested"),
        (
            "2.13.0",
            "3.9.0",
            "torch 2.13.0 was built with triton 3.7, and triton 3.9.0 is",
        ),
    ],
)
def test_versions_that_were_not_tested_are_one_sentence(
    torch: str, triton: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_versions(monkeypatch, torch=torch, triton=triton)
    found = tested_versions.why_untested()
    assert found.startswith(sentence) and bool(found) == bool(sentence)


def test_the_command_warns_of_versions_that_were_not_tested_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conformance_commands, "why_untested", lambda: "torch 2.16 is")
    found = CliRunner().invoke(app, ["check", "no_such_module"])
    assert found.exit_code == 2
    assert found.stderr.splitlines()[0] == "torch 2.16 is"
    assert "module no_such_module does not exist" in found.stderr


def test_a_triton_without_what_the_kernels_use_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_versions(monkeypatch, triton="3.5.1")
    assert "triton 3.5.1 is installed" in tested_versions.why_too_old()
    for right in ("", "3.6.0", "3.10.0"):
        install_versions(monkeypatch, triton=right)
        assert tested_versions.why_too_old() == ""


@pytest.mark.parametrize(
    ("system", "machine", "words"),
    [
        ("Linux", "x86_64", "which is not installed: pip install 'triton>=3.6,<3.10'"),
        ("Linux", "aarch64", "which is not installed: pip install 'triton>=3.6,<3.10'"),
        ("Linux", "riscv64", "has wheels for Linux on x86_64 and aarch64 only (here: Linux"),
        ("Darwin", "arm64", "(here: Darwin on arm64); pagetwin.reference has the same"),
    ],
)  # fmt: skip
def test_a_missing_triton_is_explained_for_the_machine(
    system: str, machine: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert words in why_no_triton()


# ---- triton's interpreter


@triton.jit
def masked_sum_kernel(numbers, count, limit, out, BLOCK: tl.constexpr):
    bound = tl.load(count)
    offset = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(bound):
        is_read = (offset < bound) & (bound <= limit)
        total += tl.load(numbers + offset, mask=is_read, other=0) * (step + 1)
    tl.store(out + offset, total)


def test_a_loaded_number_bounds_a_loop_and_takes_part_in_a_mask(
    device: torch.device,
) -> None:
    """Triton 3.6 beside numpy 2.4 rejected the loop bound, and triton 3.9 the mask."""
    numbers = torch.tensor([1.0, 10.0, 100.0, 1000.0], device=device)
    count = torch.tensor([3], dtype=torch.int32, device=device)
    out = torch.empty_like(numbers)
    check_launch(out)
    masked_sum_kernel[(1,)](numbers, count, 5, out, BLOCK=4)
    assert out.tolist() == [6.0, 60.0, 600.0, 0.0]


class Scope:
    """Methods that the interpreter has replaced, by name."""

    def __init__(self) -> None:
        self.methods: dict[str, Any] = {}

    def set_attr(self, owner: Any, name: str, method: Any) -> None:
        self.methods[name] = method


def interpreter_of(version: str) -> Any:
    """Return a module with the parts of triton's interpreter that are repaired."""

    class InterpreterBuilder:
        def create_splat(self, block: Any, number: Any) -> Any:
            return number.dtype

    return SimpleNamespace(
        triton=SimpleNamespace(__version__=version),
        tl=tl,
        TensorHandle=lambda data, dtype: SimpleNamespace(data=data, dtype=dtype),
        InterpreterBuilder=InterpreterBuilder,
        _patch_lang_tensor=lambda tensor, scope: scope.set_attr(tensor, "T", None),
    )


@pytest.mark.parametrize(
    ("with_triton", "with_numpy", "is_repaired"),
    [("3.6.0", "2.4.0", True), ("3.6.0", "2.3.5", False), ("3.7.1", "2.5.5", False)],
)
def test_loop_bounds_are_repaired_for_triton_3_6_beside_numpy_2_4(
    with_triton: str,
    with_numpy: str,
    is_repaired: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numpy, "__version__", with_numpy)
    interpreter = interpreter_of(with_triton)
    repair_interpreter.__wrapped__(interpreter)
    scope = Scope()
    interpreter._patch_lang_tensor(tl.tensor, scope)
    assert set(scope.methods) == ({"T", "__index__"} if is_repaired else {"T"})
    if is_repaired:
        one = SimpleNamespace(handle=SimpleNamespace(data=numpy.array([7])))
        assert scope.methods["__index__"](one) == 7


def test_kernels_that_are_checked_run_in_a_repaired_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the launches of this package were repaired, and other kernels could not run."""
    interpreter = interpreter_of("3.6.0")
    monkeypatch.setattr(numpy, "__version__", "2.4.0")
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", interpreter)
    # this interpreter cannot be hashed, so its repair cannot be cached
    monkeypatch.setattr(
        triton_versions, "repair_interpreter", repair_interpreter.__wrapped__
    )
    adapter = tmp_path / "my_repaired_kernels.py"
    adapter.write_text("def paged_attention(): pass")
    load_candidate(str(adapter))
    scope = Scope()
    interpreter._patch_lang_tensor(tl.tensor, scope)
    assert "__index__" in scope.methods


@pytest.mark.parametrize(
    ("version", "dtype"), [("3.8.0", tl.int32), ("3.9.0", tl.int1)]
)
def test_booleans_stay_booleans_in_triton_3_9(version: str, dtype: Any) -> None:
    interpreter = interpreter_of(version)
    repair_interpreter.__wrapped__(interpreter)
    # the handle of a comparison's result has the dtype of what was compared
    result = interpreter.TensorHandle(numpy.array([True]), tl.int32)
    assert interpreter.InterpreterBuilder().create_splat(None, result) == dtype
    number = interpreter.TensorHandle(numpy.array([7], numpy.int32), tl.int32)
    assert interpreter.InterpreterBuilder().create_splat(None, number) == tl.int32


# ---- triton's launch


@pytest.mark.parametrize(
    "encode", [lambda arg, meta: [arg, meta], lambda arg, meta, _: [arg, meta]]
)
def test_a_tensor_map_is_encoded_by_each_version_of_triton(
    encode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.8 added an argument, and the second launch on Hopper raised a TypeError."""
    monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", encode)
    launcher = Launcher(None, lambda: (), {}, 4, 1)
    launcher._map_kinds = ["kind of map 0", "kind of map 1"]
    assert launcher.encode(1, "descriptor") == ["descriptor", "kind of map 1"]


# ---- the matrix


def test_the_record_is_of_declared_corners_and_none_has_failed() -> None:
    record = json.loads(version_matrix.RECORD.read_text(encoding="utf-8"))["corners"]
    declared = {corner.name: corner for corner in CORNERS}
    assert list(record) == [name for name in declared if name in record]
    for name, found in record.items():
        corner = declared[name]
        assert (found["torch"], found["triton"]) == (corner.torch, corner.triton)
        assert ("reason" in found) != ("versions" in found), name
        assert found.get("failures", []) == [], name


def test_a_corner_that_fails_does_not_end_the_matrix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def install(corner: version_matrix.Corner, cuda_builds: bool) -> Path:
        if corner.name == "newest":
            raise NotInstalled("torch 2.15 is a CUDA build")
        return tmp_path

    def run_tests(python: Path, corner: version_matrix.Corner, workers: int) -> Any:
        failed = ["a.test"] if corner.name == "oldest" else []
        return {"passed": 9, "failed": len(failed), "skipped": 1, "failures": failed}

    versions = {"python": "3.10.1", "torch": "2.10.0"}
    monkeypatch.setattr(version_matrix, "install", install)
    monkeypatch.setattr(version_matrix, "run_tests", run_tests)
    monkeypatch.setattr(version_matrix, "installed_versions", lambda python: versions)
    monkeypatch.setattr(version_matrix, "RECORD", tmp_path / "versions.json")
    monkeypatch.setattr(version_matrix, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["", "oldest", "newest", "torch-2.13"])
    assert version_matrix.main() == 1
    record = json.loads((tmp_path / "versions.json").read_text())["corners"]
    assert list(record) == ["oldest", "torch-2.13", "newest"]
    assert record["newest"]["reason"] == "torch 2.15 is a CUDA build"
    assert record["oldest"]["failures"] == ["a.test"]
    printed = capsys.readouterr().out
    assert "9 passed, 1 failed, 1 skipped" in printed
    assert "torch 2.15 is a CUDA build" in printed


def test_a_corner_that_cannot_be_installed_keeps_the_entry_of_its_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine that installs no CUDA builds replaced the result of one that did."""

    def install(corner: version_matrix.Corner, cuda_builds: bool) -> Path:
        raise NotInstalled("torch 2.15 is a CUDA build")

    ran = {"newest": {"versions": {"torch": "2.15.0"}, "passed": 9}}
    record = tmp_path / "versions.json"
    record.write_text(json.dumps({"corners": ran}))
    monkeypatch.setattr(version_matrix, "install", install)
    monkeypatch.setattr(version_matrix, "RECORD", record)
    monkeypatch.setattr(version_matrix, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["", "newest", "oldest"])
    assert version_matrix.main() == 0
    found = json.loads(record.read_text())["corners"]
    assert found["newest"] == ran["newest"]
    assert found["oldest"]["reason"] == "torch 2.15 is a CUDA build"


def test_a_report_of_pytest_is_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="4" failures="1" errors="1" skipped="1">'
        '<testcase classname="a" name="right"/>'
        '<testcase classname="a" name="left_out"><skipped/></testcase>'
        '<testcase classname="a" name="wrong"><failure/></testcase>'
        '<testcase classname="a" name="broken"><error/></testcase>'
        "</testsuite></testsuites>"
    )
    assert version_matrix.read_report(report) == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "failures": ["a::wrong", "a::broken"],
    }
