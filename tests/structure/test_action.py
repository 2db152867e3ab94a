"""The GitHub Action that checks a kernel: its steps are run here, as a runner would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.source_tree import ROOT

FOLDER = ROOT / ".github/actions/check"
LAW = "every_new_token_attends_to_its_sequence_up_to_itself"
LINE = "        blocks = block_table[req"
BUG = "        seq_len -= seq_len % 16 == 1\n"
"""A key alone in its block is not read."""


def action() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="the docs extra is not installed")
    found: dict[str, Any] = yaml.safe_load((FOLDER / "action.yml").read_text("utf-8"))
    return found


def run_step(step: dict[str, Any], given: dict[str, str], folder: Path) -> Any:
    """Run a step in bash, with the inputs in its environment."""
    inputs = {name: own.get("default", "") for name, own in action()["inputs"].items()}
    variables = {
        name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda at: (inputs | given)[at[1]], value)
        for name, value in step.get("env", {}).items()
    }  # fmt: skip
    assert "${{" not in "".join([step["run"], *variables.values()])
    assert step["shell"] == "bash"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # what a runner sets; and pip neither downloads nor installs anything here
    variables |= {"GITHUB_ACTION_PATH": str(FOLDER), "PATH": path, "PIP_DRY_RUN": "1"}
    variables |= {
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        "PIP_NO_INDEX": "1",
    }
    # one law is enough
    variables |= {"PIP_NO_BUILD_ISOLATION": "0", "PYTEST_ADDOPTS": f"-k {LAW}"}
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", step["run"]],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_inputs_reach_bash_as_variables_alone() -> None:
    """A value that is written into the script could run as a part of it."""
    for step in action()["runs"]["steps"]:
        assert "${{" not in step["run"]


@pytest.mark.extended
def test_the_package_of_the_action_is_installed_beside_what_is_there(
    tmp_path: Path,
) -> None:
    pytest.importorskip("pip")
    done = run_step(action()["runs"]["steps"][0], {"adapter": "a.py"}, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Would install pagetwin-\S+$", done.stdout, re.M), done.stdout


@pytest.mark.extended
def test_a_right_adapter_passes_and_a_broken_one_fails_with_its_input(
    tmp_path: Path,
) -> None:
    text = (ROOT / "docs/adapters/torch_sdpa.py").read_text("utf-8")
    (tmp_path / "right.py").write_text(text)
    (tmp_path / "broken.py").write_text(text.replace(LINE, BUG + LINE))
    # neither the settings nor the tests of the project take part
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "test_mine.py").write_text("1 / 0\n")
    (tmp_path / "xfails.toml").write_text(
        f'[[xfail]]\nlaw = "{LAW}"\nreason = "https://github.com/me/kernels/issues/1"\n'
    )
    step = action()["runs"]["steps"][1]
    for adapter, xfails, code in (
        ("right.py", "", 0),
        ("broken.py", "", 1),
        ("broken.py", "xfails.toml", 0),
    ):
        done = run_step(step, {"adapter": adapter, "xfails": xfails}, tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
    junit = ElementTree.parse(tmp_path / "laws.xml").getroot()
    assert [case.get("name") for case in junit.iter("testcase")] == [LAW]
    summary = (tmp_path / "summary.md").read_text()
    titles = re.findall(r"^# (.*)\n\n(.*)$", summary, re.M)
    assert titles == [
        ("right.py on cpu", "1 held."),
        ("broken.py on cpu", "1 broken."),
        ("broken.py on cpu", "1 known failure."),
    ]
    assert "reproduce(\n    'broken.py'," in summary and "issues/1" in summary


def test_actions_of_others_are_pinned_by_commit() -> None:
    """A tag can be moved to other code; a commit cannot."""
    files = [*(ROOT / ".github").rglob("*.yml")]
    used = [
        line.split("uses:")[1].strip()
        for file in files
        for line in file.read_text("utf-8").splitlines()
        if "uses:" in line
    ]
    assert len(used) >= 4
    for action_of in used:
        is_own = action_of.startswith("./")
        assert is_own or re.fullmatch(
            r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", action_of
        )
