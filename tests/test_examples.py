"""The worked examples are right, on both twins, and stand in the docstrings as they are."""

import ast
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import numpy
import pytest
import torch
import triton
from pagetwin.contract.operations import CONCEPTS, load_implementation
from pagetwin.contract.operations import concept as concept_of
from pagetwin.examples import EXAMPLES, Example, example_names, examples_of, run_example
from pagetwin.tools.explain import explain
from rich.console import Console

ROOT = Path(__file__).parents[1]
FILES_OF_CONCEPTS = [ROOT / each.path("reference") for each in CONCEPTS]
each_example = pytest.mark.parametrize(
    "example", EXAMPLES, ids=lambda example: example.operation
)


def steps_of(path: Path, function: str) -> list[str]:
    """Return the `# step:` comments of a function or class of the reference, in file order.

    A function that calls one of a file without operations goes on with the steps of that one, and
    of those that it calls there.
    """
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        is_definition = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if is_definition and node.name == function:
            lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
            found = re.findall(r"# step: (.*)", "\n".join(lines))
            called = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            for file, names in imported_files(path):
                for name in sorted(called & names):
                    found += steps_of(file, name)
            if path not in FILES_OF_CONCEPTS:
                own = re.findall(r"^def (\w+)", source, re.MULTILINE)
                for name in called & set(own) - {function}:
                    found += steps_of(path, name)
            return found
    raise AssertionError(f"{path} has no {function}")


def imported_files(path: Path) -> Iterator[tuple[Path, set[str]]]:
    """Return the files of the reference without operations that a file imports functions from."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            folder = path.parents[node.level - 1]
            file = (folder / node.module.replace(".", "/")).with_suffix(".py")
            inside = file.is_file() and file.is_relative_to(ROOT / "reference")
            if inside and file not in FILES_OF_CONCEPTS:
                names = {each.name for each in node.names}
                yield file, {name for name in names if name.islower()}


def test_every_operation_has_an_example() -> None:
    for concept in CONCEPTS:
        named = [each.operation for each in examples_of(concept.name)]
        assert named == list(concept.operations or ["forward"])


@each_example
@pytest.mark.parametrize("twin", ["reference", "optimized"])
def test_an_example_shows_what_it_promises(example: Example, twin: str) -> None:
    if twin == "optimized" and torch.cuda.is_available():
        pytest.skip("its tensors lie on the host: run once for all in the interpreter")
    names = example_names(load_implementation(twin))
    for source, promised, shown in run_example(example, names):
        assert shown == promised, source


def interpreter_works() -> bool:
    """Triton 3.6's interpreter fails beside numpy 2.4 and newer."""
    numpy_version = tuple(map(int, numpy.__version__.split(".")[:2]))
    return not (triton.__version__.startswith("3.6.") and numpy_version >= (2, 4))


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="each example has run in the interpreter"
)
@pytest.mark.skipif(
    not interpreter_works(), reason="triton 3.6 cannot interpret beside this numpy"
)
def test_the_examples_run_in_the_interpreter_beside_a_gpu() -> None:
    command = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "promises"]
    without_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, env=without_gpu, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]


@each_example
def test_every_number_of_a_story_is_right(example: Example) -> None:
    names = example_names(load_implementation("reference"))
    list(run_example(example, names))
    for step in example.story:
        assert repr(eval(step.expression, dict(names))) == step.value, step.expression


@each_example
def test_a_story_follows_the_steps_of_the_function(example: Example) -> None:
    told = [step.step for step in example.story if step.step]
    path = ROOT / concept_of(example.concept).path("reference")
    assert told == steps_of(path, example.operation)


@each_example
def test_the_docstring_holds_the_example_as_it_is(example: Example) -> None:
    if example.concept == "backend":
        pytest.skip("a backend is many methods: its example stands in none of them")
    operation = getattr(load_implementation("reference"), example.operation)
    docstring = inspect.getdoc(operation) or ""
    assert textwrap.indent(example.code.rstrip(), "    ") in docstring


@each_example
def test_an_example_is_told_in_sentences(example: Example) -> None:
    assert example.title.endswith(".")
    for step in example.story:
        assert step.text.endswith(".")


@pytest.mark.parametrize("concept", [each.name for each in CONCEPTS])
def test_an_explanation_fits_into_80_columns_and_shows_every_result(
    concept: str,
) -> None:
    printed = StringIO()
    explain(concept, Console(width=80, file=printed))
    text = printed.getvalue()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    for example in examples_of(concept):
        assert example.operation in text
        for _, shown in example.calls:
            for line in shown.splitlines():
                assert line.strip() in text


def test_an_unknown_concept_is_refused_with_what_there_is() -> None:
    with pytest.raises(KeyError, match="expected one of block_table, slot_mapping"):
        explain("paging", Console(quiet=True))
