"""What vLLM's own functions returned, both twins return too, or say why not.

    pytest tests/test_golden.py --golden-dir DIR

runs other folders with more cases of the same files.
"""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden.adapters
import pytest
import torch
from golden.cases import (
    ADAPTERS,
    FOLDER,
    INTERPRETER_ONLY,
    ON_DEVICE,
    Case,
    decode,
    differences,
    move,
    read_cases,
)

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

from conftest import TWINS

for module in pkgutil.iter_modules(golden.adapters.__path__):
    importlib.import_module(f"golden.adapters.{module.name}")

NAMED_ERRORS = (
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    ImportError,
    NotImplementedError,
    RuntimeError,
)
RULES: list[dict[str, str]] = tomllib.loads(
    (FOLDER / "deviations.toml").read_text(encoding="utf-8")
).get("deviation", [])


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
        metafunc.parametrize("rule", RULES, ids=lambda rule: rule["file"])


def rules_for(case: Case, twin: str) -> list[dict[str, str]]:
    """Return the rules whose condition this case meets."""
    names = {"inputs": case.inputs, "expected": case.expected, "twin": twin}
    return [
        rule
        for rule in RULES
        if rule["file"] == case.file and eval(rule["when"], dict(names))
    ]


def run(case: Case, name: str, version: str) -> dict[str, Any]:
    """Return what a twin makes of a case; {"raises": name} if it raises a named error."""
    try:
        # inputs are decoded anew for every run: a twin that changes one harms no other
        inputs = decode(case.inputs)
        if case.file not in ON_DEVICE or not torch.cuda.is_available():
            return ADAPTERS[case.file, version](TWINS[name].raw, inputs)
        with torch.device("cuda"):
            inputs = move(inputs, torch.device("cuda"))
            return ADAPTERS[case.file, version](TWINS[name].raw, inputs)
    except NAMED_ERRORS as error:
        return {"raises": type(error).__name__, "message": str(error)}


def compare(case: Case, found: dict[str, Any], version: str) -> Iterator[str]:
    """Yield where a twin's result differs from vLLM's."""
    expected = case.other.get(version, case.expected) if version else case.expected
    if "raises" in expected or "raises" in found:
        if not ("raises" in expected and "raises" in found):
            yield f".raises: found {found}, expected {expected}"
        return
    tolerance = expected.get("tolerance") or case.expected.get("tolerance")
    fields = {name: v for name, v in expected.items() if name != "tolerance"}
    yield from differences(found, fields, tolerance)


def is_excused(difference: str, rules: list[dict[str, str]]) -> bool:
    """Tell whether a rule covers the field; `[]` in a rule's field stands for any index."""
    anywhere = re.sub(r"\[\d+\]", "[]", difference)
    return any(
        rule["field"] == "*"
        # the host's mirror of a field deviates with it; another field, such as
        # seq_lens_tensor beside seq_lens, needs a rule of its own
        or re.match(rf"\.{re.escape(rule['field'])}(_cpu|_float)?(?!\w)", place)
        for rule in rules
        for place in (difference, anywhere)
    )


def test_case(case: Case, name: str, version: str, record_property: Any) -> None:
    why = INTERPRETER_ONLY.get(case.file)
    if why and name == "optimized" and torch.cuda.is_available():
        pytest.skip(why)
    found = run(case, name, version)
    rules = rules_for(case, name)
    parted = False
    for difference in compare(case, found, version):
        assert is_excused(difference, rules), f"{case.file}/{case.name}{difference}"
        parted = True
    for rule in rules:
        if "value" in rule and not version:
            right = eval(rule["value"], {"inputs": case.inputs, "torch": torch})
            place: Any = found
            for name_ in rule["field"].split("."):
                place = place.get(name_) if isinstance(place, dict) else None
            wrong = list(differences(place, _recorded(right), None))
            assert not wrong, f"{case.file}/{case.name}: not what is right: {wrong}"
    record_property("golden", "deviated" if parted else "equal")


def _recorded(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(value.shape), "data": value.tolist()}
    return list(value) if isinstance(value, tuple) else value


def test_every_file_has_an_adapter(file: str) -> None:
    assert (file, "") in ADAPTERS, f"write an adapter of {file}.json"


def test_a_listed_deviation_still_deviates(
    rule: dict[str, str], request: pytest.FixtureRequest
) -> None:
    assert rule["reason"] and rule["right"]
    folder = Path(request.config.getoption("--golden-dir") or FOLDER)
    if not (folder / f"{rule['file']}.json").exists():
        pytest.skip("the folder has no such file")
    meets = [
        (case, name)
        for case in read_cases(folder, rule["file"])
        for name in TWINS
        if rule in rules_for(case, name)
    ]
    versions = [version for known, version in ADAPTERS if known == rule["file"]]
    parts = any(
        is_excused(difference, [rule])
        for case, name in meets
        for version in versions
        for difference in compare(case, run(case, name, version), version)
    )
    assert parts or not meets, "both are equal in every case that the rule is for"
