"""Both twins return what vLLM's functions returned, or deviate where a rule predicts it.

    pytest tests/test_golden.py --golden-dir DIR

runs other folders with more cases of the same files.
"""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import golden.adapters
import golden.rules
import pytest
import torch
from conftest import TWINS
from golden.cases import ADAPTERS, FOLDER, INTERPRETER_ONLY, Case, read_cases
from golden.checking import check
from golden.deviations import RULES, Rule

for package in (golden.adapters, golden.rules):
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of every case and twin, and one of every file and rule."""
    folder = Path(metafunc.config.getoption("--golden-dir") or FOLDER)
    files = sorted(path.stem for path in folder.glob("*.json"))
    if "case" in metafunc.fixturenames:
        runs = [
            (case, name, version)
            for file in files
            for case in read_cases(folder, file)
            for (known, version) in sorted(ADAPTERS)
            if known == file
            for name in TWINS
        ]
        names = [f"{c.file}-{c.name}{'-' * bool(v)}{v}-{name}" for c, name, v in runs]
        metafunc.parametrize(("case", "name", "version"), runs, ids=names)
    if "file" in metafunc.fixturenames:
        metafunc.parametrize("file", files)
    if "rule" in metafunc.fixturenames:
        metafunc.parametrize("rule", RULES, ids=lambda rule: f"{rule.file}-{rule.name}")


def test_case(case: Case, name: str, version: str, record_property: Any) -> None:
    why = INTERPRETER_ONLY.get(case.file)
    if why and name == "optimized" and torch.cuda.is_available():
        pytest.skip(why)
    deviates = check(case, name, version)
    record_property("golden", "deviated" if deviates else "equal")


def test_every_file_has_an_adapter(file: str) -> None:
    assert (file, "") in ADAPTERS, f"write an adapter of {file}.json"


def test_a_rule_says_what_vllm_does_and_what_is_right(rule: Rule) -> None:
    assert rule.reason and rule.right
    assert (rule.file, "") in ADAPTERS, f"{rule.file} is not a case file"
