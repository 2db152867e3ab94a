"""The pytest plugin: laws as tests, known failures, time limits, reports, and a light import."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from pagetwin.conformance.base.results import Result, Status
from pagetwin.conformance.checks.expect import Disagreement
from pagetwin.conformance.pytest_plugin import plugin, tries
from pagetwin.conformance.pytest_plugin.xfails import entries_of, read_entries
from pagetwin.conformance.running.law_names import law_names
from pagetwin.conformance.running.worker import Job

pytest_plugins = ["pytester"]

FIRST = "every new token attends to its sequence up to itself"
SECOND = "large heads odd blocks and long rows are right"
THIRD = "an empty batch gives rows of zeros"
LINK = "https://github.com/me/kernels/issues/12"
WRONG = """
from functools import wraps
from pagetwin.reference import paged_attention as right


@wraps(right)
def paged_attention(*tensors, **given):
    return right(*tensors, **given) + 1
"""


def slug(law: str) -> str:
    return law.replace(" ", "_")


class FakeWorker:
    """A worker whose laws end as a test says; all others are undeclared."""

    ends: dict[str, Result]
    tried: list[str]

    def __init__(self, implementation: str, device: str, gpu: str | None = None):
        self.implementation, self.device, self.gpu = implementation, device, gpu
        self.deadline, self.needs = math.inf, dict[str, list[str]]()
        self.failed_at_once = False

    def start(self) -> None:
        self.needs = {law: ["paged_attention"] for _, law in law_names()}

    def stop(self) -> None:
        self.needs = {}

    def try_law(self, job: Job, area: str) -> Result:
        if job.case is None:
            self.tried.append(job.law)
        if time.monotonic() >= self.deadline:
            return Result(job.law, area, Status.UNFINISHED, reason="the time was over")
        undeclared = Result(job.law, area, Status.OUTSIDE, reason="not declared")
        return self.ends.get(job.law, undeclared)


Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs pytest on an adapter whose laws end as given."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(plugin, "check_can_run", lambda name, device: device or "cpu")
    for module in (plugin, tries):
        monkeypatch.setattr(module, "Worker", FakeWorker)
    pytester.makepyfile(my_adapter="1 / 0  # is never imported by pytest")

    def go(*words: str, **ends: Status) -> pytest.RunResult:
        laws = dict(first=FIRST, second=SECOND, third=THIRD)
        areas = {law: area for area, law in law_names()}
        FakeWorker.tried = []
        FakeWorker.ends = {
            laws[name]: Result(laws[name], areas[laws[name]], status, cases=3)
            for name, status in ends.items()
        }
        for law, result in FakeWorker.ends.items():
            if result.status == Status.BROKEN:
                FakeWorker.ends[law] = replace(
                    result, case="Plan(1)", what="output", where="at token 0",
                    found="0.0", right="2.5",
                )  # fmt: skip
        return pytester.runpytest_inprocess(
            "--pagetwin", "my_adapter.py", "-p", "no:cacheprovider", *words
        )

    return go


def xfails(kind: str, law: str, reason: str = LINK, **more: str) -> str:
    fields = {"law": law, "reason": reason, **more}
    lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    return "\n".join([f"[[{kind}]]", *lines, ""])


# ---- tests


def test_every_law_is_a_test_beside_those_of_the_project(run: Run) -> None:
    Path("test_mine.py").write_text("def test_mine(): pass\n")
    found = run("--collect-only", "-q")
    laws = [line for line in found.outlines if line.startswith("my_adapter.py::")]
    assert laws == [f"my_adapter.py::{slug(law)}" for _, law in law_names()]
    assert "test_mine.py::test_mine" in found.outlines and not FakeWorker.tried


def test_how_a_law_ends_is_how_its_test_ends(run: Run) -> None:
    ends = {"first": Status.HELD, "second": Status.BROKEN, "third": Status.UNFINISHED}
    found = run("-rs", "--junitxml=r.xml", **ends)
    count = len(law_names())
    found.assert_outcomes(passed=1, failed=1, skipped=count - 2)
    assert found.ret == 1 and FakeWorker.tried == [law for _, law in law_names()]
    text = found.stdout.str()
    assert "found 0.0\n  right 2.5\n  input Plan(1)\n  to reproduce:" in text
    assert (
        "    'Plan(1)',\n    device='cpu',\n)" in text
        and "items.py:" not in (text.partition("short test summary")[0])
    )
    assert f"SKIPPED [{count - 3}] my_adapter.py:1: undeclared: not declared" in text
    assert "SKIPPED [1] my_adapter.py:1: not finished:" in text
    tree = ElementTree.parse("r.xml").getroot()
    cases = {case.get("name"): case for case in tree.iter("testcase")}
    assert len(cases) == count
    (failure,) = cases[slug(SECOND)]
    assert failure.get("message", "").startswith(
        "broken: output, at token 0: found 0.0"
    )
    assert "reproduce(\n    'my_adapter.py'," in (failure.text or "")


def test_laws_are_chosen_and_ended_as_other_tests_are(run: Run) -> None:
    broken = {"first": Status.BROKEN, "second": Status.BROKEN, "third": Status.BROKEN}
    run("-k", "attends_to_its_sequence or odd_blocks", "-x", **broken)
    assert FakeWorker.tried == [FIRST]
    found = run(f"my_adapter.py::{slug(SECOND)}", **broken)
    found.assert_outcomes(failed=1)
    assert FakeWorker.tried == [SECOND]
    areas = [area for area, _ in law_names()]
    run("-k", "batch_slices", "-m", "pagetwin")
    assert len(FakeWorker.tried) == areas.count("batch_slices")


def test_a_known_failure_is_expected_until_the_law_holds(run: Run) -> None:
    Path("x.toml").write_text(xfails("xfail", SECOND, f"an edge: {LINK}"))
    words = ("--pagetwin-xfails", "x.toml", "-rxX", "-k", "odd_blocks")
    found = run(*words, second=Status.CRASHED)
    found.assert_outcomes(xfailed=1, deselected=len(law_names()) - 1)
    assert found.ret == 0 and f"an edge: {LINK}" in found.stdout.str()
    for status in (Status.HELD, Status.OUTSIDE):
        found = run(*words, second=status)
        found.assert_outcomes(failed=1, deselected=len(law_names()) - 1)
        assert "remove its entry from x.toml (an edge" in found.stdout.str()
    # the law itself, as of a test that is not marked
    assert run(*words, "--runxfail", second=Status.HELD).ret == 0
    assert run(*words, "--runxfail", second=Status.CRASHED).ret == 1


def test_a_law_in_quarantine_never_runs(run: Run) -> None:
    Path("x.toml").write_text(xfails("quarantine", slug(SECOND), f"hangs: {LINK}"))
    words = ("-k", "odd_blocks or its_sequence_up", "-rs")
    found = run("--pagetwin-xfails", "x.toml", *words, first=Status.HELD)
    assert SECOND not in FakeWorker.tried and FIRST in FakeWorker.tried
    text = found.stdout.str()
    assert f"quarantine: hangs: {LINK}" in text and "1 in quarantine." in text


def test_a_run_whose_time_was_over_before_any_verdict_fails(run: Run) -> None:
    words = ("--pagetwin-seconds", "1e-9", "-k", "odd_blocks or its_sequence_up")
    found = run(*words, first=Status.HELD)
    assert found.ret == 1
    assert "--pagetwin-seconds 1e-09 was over before any law" in found.stdout.str()
    assert run(*words[2:], first=Status.HELD, second=Status.UNFINISHED).ret == 0


def test_the_job_summary_has_the_reproduction_and_what_is_known(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("x.toml").write_text(
        xfails("xfail", FIRST, f"known: {LINK}")
        + xfails("quarantine", THIRD, f"hangs: {LINK}")
    )
    Path("summary.md").write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    ends = {"first": Status.BROKEN, "second": Status.BROKEN}
    words = ("-k", "attention or empty", "--pagetwin-xfails", "x.toml")
    run(*words, **ends)
    text = Path("summary.md").read_text()
    assert text.startswith("before\n# my_adapter.py on cpu\n")
    assert f"| {SECOND} | attention | broken |" in text
    assert "```python\nimport os" in text and f"- {THIRD}: hangs: {LINK}" in text
    assert f"- {FIRST}: known: {LINK}" in text
    assert "laws are about what the adapter does not declare" in text
    assert len(text.splitlines()) < 60


def test_symptoms_are_tried_again_once_each(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[str] = []

    def try_again(worker: Any, results: list[Result], left: float) -> list[Result]:
        again.append(results[0].law)
        return [replace(results[0], message="again")]

    monkeypatch.setattr(tries, "try_symptoms_again", try_again)
    broken = {"first": Status.BROKEN, "second": Status.BROKEN, "third": Status.CRASHED}
    found = run("-k", "odd_blocks or its_sequence_up or an_empty_batch", **broken)
    assert again == [FIRST, THIRD] and "\n  again\n" in found.stdout.str()


# ---- known failures


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (xfails("xfail", FIRST, "later"), "expected a link to an issue"),
        (xfails("xfail", "evry new token"), "no law is called 'evry new token'"),
        (xfails("xfail", FIRST[1:]), f"such as '{FIRST}'"),
        (xfails("xfail", FIRST) + xfails("quarantine", FIRST), "one entry for"),
        (xfails("skip", FIRST), "'skip' is unknown: expected .*xfail"),
        (f"[xfail]\nlaw = {FIRST!r}", r"expected \[\[xfail\]\]"),
        ("xfail = [3]", "xfail 1 has 3: expected law, reason"),
        (xfails("xfail", FIRST, law_id="3"), "has law, reason, law_id: expected"),
        ("[[xfail]]\nlaw = 3\nreason = 'a'", "law = 3: expected a string"),
        (xfails("xfail", FIRST, adapter="none.py"), "the file does not exist"),
        ("[[xfail]", "expected TOML: "),
    ],
)
def test_a_wrong_entry_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "x.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=words) as error:
        read_entries([str(file)])
    assert str(error.value).startswith(str(file)) and "\n" not in str(error.value)


def test_an_entry_is_about_its_adapter_or_about_all(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(
        xfails("xfail", slug(FIRST)) + xfails("xfail", SECOND, adapter="kernels.decode")
    )
    entries = read_entries([str(tmp_path / "x.toml")])
    assert entries_of(entries, "xfail", "kernels.decode").keys() == {FIRST, SECOND}
    assert entries_of(entries, "xfail", "others").keys() == {FIRST}
    assert not entries_of(entries, "quarantine", "others")
    file = tmp_path / "mine.py"
    file.touch()
    entry = replace(entries[1], adapter=str(tmp_path / "." / "x" / ".." / "mine.py"))
    assert entries_of([entry], "xfail", str(file)).keys() == {SECOND}


# ---- usage errors


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--pagetwin", "my_adapter.py"),
            "--pagetwin my_adapter.py: it is given twice",
        ),
        (("--pagetwin-seconds", "0"), "--pagetwin-seconds 0: expected more than 0"),
        (("--pagetwin-xfails", "no.toml"), "no.toml: No such file or directory"),
    ],
)
def test_a_wrong_option_is_a_usage_error(
    run: Run, words: tuple[str, ...], sentence: str
) -> None:
    found = run(*words)
    assert (found.ret, found.errlines) == (4, [f"ERROR: {sentence}", ""])


def test_an_option_without_an_adapter_is_a_usage_error(
    pytester: pytest.Pytester,
) -> None:
    found = pytester.runpytest_inprocess("--pagetwin-device", "cpu")
    assert found.ret == 4
    assert found.errlines[0] == (
        "ERROR: --pagetwin-device: expected with --pagetwin ADAPTER"
    )


# ---- processes


def start(folder: Path, *words: str, **environment: str) -> Any:
    """Run pytest in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=folder,
        env=os.environ | {"PYTEST_ADDOPTS": "", "COLUMNS": "200"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


LIGHT = """
import sys

def test_light():
    assert not {"torch", "triton", "rich", "typer", "hypothesis"} & sys.modules.keys()
    own = sorted(name for name in sys.modules if name.split(".")[0] == "pagetwin")
    assert own == [
        "pagetwin", "pagetwin.conformance", "pagetwin.conformance.pytest_plugin",
        "pagetwin.contract", "pagetwin.contract.extras",
    ]

def test_not_rewritten():
    from pagetwin.conformance.running import law_names
    assert "Rewrit" not in type(law_names.__spec__.loader).__name__
"""


def test_a_run_without_an_adapter_imports_almost_nothing(tmp_path: Path) -> None:
    """Every pytest run where pagetwin is installed loads the plugin.

    Pytest also compiled all modules of an installed wheel anew, so that imports took three times
    as long.
    """
    (tmp_path / "test_light.py").write_text(LIGHT)
    metadata = tmp_path / "site" / "pagetwin-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: pagetwin\nVersion: 0.1.0\n")
    (metadata / "RECORD").write_text("pagetwin/__init__.py,,\n")
    (metadata / "entry_points.txt").write_text(
        "[pytest11]\npagetwin = pagetwin.conformance.pytest_plugin\n"
    )
    done = start(tmp_path, "-q", PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 0, done.stdout


@pytest.mark.extended
def test_an_adapter_that_cannot_run_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "gone.py").write_text("import no_such_library\n")
    (tmp_path / "gpu.py").write_text(
        "def paged_attention(*arguments, **given):\n    raise RuntimeError('no NVIDIA')\n"
    )
    for adapter, words in (
        ("gone.py", "No module named 'no_such_library' (line 1)"),
        ("gpu.py", "gpu.py needs a GPU (RuntimeError: no NVIDIA)"),
    ):
        done = start(tmp_path, "--pagetwin", adapter, "--pagetwin-device", "cpu")
        assert done.returncode == 4, done.stdout
        (line,) = [line for line in done.stderr.splitlines() if line]
        assert line.startswith("ERROR: ") and words in line


@pytest.mark.extended
def test_laws_are_distributed_and_a_broken_one_can_be_reproduced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pytest-xdist. The program in the JUnit report breaks the law."""
    folder = tmp_path / "adapters"
    folder.mkdir()
    (folder / "wrong.py").write_text(
        "from pagetwin.conformance import Support\n"
        "SUPPORT = Support(operations=['paged_attention'], dtypes=['float32'],\n"
        f"    cache_dtypes=['float32'], query_lens=[1], options=[], rejects=[]){WRONG}"
    )
    (tmp_path / "test_mine.py").write_text("def test_mine(): pass\n")
    done = start(
        tmp_path, "-n", "2", "--pagetwin", "adapters/wrong.py", "--pagetwin-device",
        "cpu", "-k", "attends_to_its_sequence or slots_on_the_device or mine",
        "--junitxml=r.xml", GITHUB_STEP_SUMMARY="s.md",
    )  # fmt: skip
    text = done.stdout
    assert done.returncode == 1 and "1 failed, 1 passed" in text, text + done.stderr
    assert "adapters/wrong.py on cpu: 1 broken, " in text
    assert (tmp_path / "s.md").read_text().startswith("# adapters/wrong.py on cpu\n")
    tree = ElementTree.parse(tmp_path / "r.xml").getroot()
    (failure,) = [
        case[0].text or ""
        for case in tree.iter("testcase")
        if case.get("name") == slug(FIRST)
    ]
    program = failure[failure.index("import os\n") :]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(Disagreement, match="output, at token 0"):
        exec(program, {})
    del sys.modules["wrong"]
