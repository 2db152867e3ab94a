"""Both twins return what vLLM's functions returned, or deviate where a rule predicts it.

    pytest tests/golden/test_golden.py --golden-dir DIR

runs other folders with more cases of the same files.
"""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.source_tree import ROOT
from support.twins import TWINS

import golden.adapters
import golden.rules
from golden.cases import ADAPTERS, FOLDER, INTERPRETER_ONLY, Case, read_cases
from golden.checking import check, compare, copied, lacks_a_library, run
from golden.deviations import RULES, Rule, needless_rules, rules_that_hold
from golden.not_tried import FILES, GAPS, Gap, why_not_tried

pytestmark = pytest.mark.quick

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
            for version in versions_of(file)
            for name in TWINS
        ]
        names = [f"{c.file}-{c.name}{'-' * bool(v)}{v}-{name}" for c, name, v in runs]
        metafunc.parametrize(("case", "name", "version"), runs, ids=names)
    if "file" in metafunc.fixturenames:
        metafunc.parametrize("file", files)
    if "rule" in metafunc.fixturenames:
        metafunc.parametrize("rule", RULES, ids=lambda rule: f"{rule.file}-{rule.name}")


def versions_of(file: str) -> list[str]:
    """Return the versions of vLLM whose results are compared; the recorded one without adapter."""
    return sorted(version for known, version in ADAPTERS if known == file) or [""]


def is_skipped(file: str, name: str) -> bool:
    """Return whether compiled kernels cannot run a file's cases on a twin."""
    is_compiled = name == "optimized" and torch.cuda.is_available()
    return is_compiled and file in INTERPRETER_ONLY


def file_and_twin(given: dict[str, Any]) -> tuple[str, str, str]:
    """Return the group of a case, of which `make test` runs two cases."""
    return given["case"].file, given["version"], given["name"]


@pytest.mark.sample(2, per=file_and_twin)
def test_case(case: Case, name: str, version: str, record_property: Any) -> None:
    if missing := why_not_tried(case):
        record_property("golden", "not tried")
        pytest.skip(f"not tried: {missing}")
    if is_skipped(case.file, name):
        pytest.skip(INTERPRETER_ONLY[case.file])
    deviates = check(case, name, version)
    record_property("golden", "deviated" if deviates else "equal")


@pytest.mark.sample(30)
@pytest.mark.parametrize("own", sorted({file for file, _ in ADAPTERS}))
def test_a_recorded_case_needs_each_rule_that_holds(own: str) -> None:
    tried = [case for case in read_cases(FOLDER, own) if not why_not_tried(case)]
    for case, version, name in product(tried, versions_of(own), TWINS):
        rules = rules_that_hold(own, copied(case.inputs), name, version)
        if not rules or is_skipped(own, name):
            continue
        found = run(case, name, version)
        if not lacks_a_library(found):
            parts = list(compare(case, found, version))
            assert not list(needless_rules(rules, parts)), f"{case.name} ({name})"


@pytest.mark.parametrize("gap", GAPS, ids=lambda gap: f"{gap.file}-{gap.name}")
def test_a_case_that_is_not_tried_would_fail(gap: Gap) -> None:
    """A condition that hides equal results only is too broad."""
    cases = [case for case in read_cases(FOLDER, gap.file) if gap.holds(case.inputs)]
    assert cases and gap.reason
    for case in cases:
        try:
            check(case, "reference", "")
        except Exception as error:
            assert str(error)
            return
        except AssertionError:
            return
    pytest.fail(f"{gap.name} of {gap.file} hides equal results only")


def test_the_page_counts_the_recorded_cases() -> None:
    page = (ROOT / "docs" / "vllm-map.md").read_text(encoding="utf-8")
    table = "\n".join(counted_cases())
    assert table in page, f"put this table into docs/vllm-map.md:\n{table}"


def counted_cases() -> Iterator[str]:
    """Yield the rows of the page: cases by part of the project, then what is missing."""
    yield "| part | files | cases | tried | not tried: what is missing |"
    yield "|---|---:|---:|---:|---|"
    parts: dict[str, list[Case]] = {}
    for file in sorted({file for file, _ in ADAPTERS}):
        part = ADAPTERS[file, ""].__module__.rpartition(".")[2].replace("_", " ")
        parts.setdefault(part, []).extend(read_cases(FOLDER, file))
    for part, cases in sorted(parts.items()):
        missing = Counter(filter(None, map(why_not_tried, cases)))
        tried, files = len(cases) - missing.total(), {case.file for case in cases}
        reasons = " ".join(f"{count}: {why}" for why, count in sorted(missing.items()))
        counts = f"{len(files)} | {len(cases)} | {tried}"
        yield f"| {part} | {counts} | {reasons} |"
    for reason, count in sorted(Counter(FILES.values()).items()):
        yield f"| none yet | {count} | not stored | 0 | {reason} |"


def test_every_file_has_an_adapter(file: str) -> None:
    is_known = ((file, "") in ADAPTERS) != (file in FILES)
    assert is_known, f"write an adapter of {file}.json, or say in FILES what is missing"


def test_a_rule_says_what_vllm_does_and_what_is_right(rule: Rule) -> None:
    assert rule.reason and rule.right
    assert (rule.file, "") in ADAPTERS, f"{rule.file} is not a case file"
