"""The worked examples, read from the docstrings of the reference, are right on both twins."""

import inspect
import os
import subprocess
import sys
import textwrap
from io import StringIO
from types import SimpleNamespace

import numpy
import pytest
import torch
import triton
from pagetwin.contract.operations import CONCEPTS, load_implementation
from pagetwin.examples import (
    EXAMPLES,
    Example,
    example_names,
    examples_of,
    run_example,
    story,
)
from pagetwin.tools.explain import explain
from rich.console import Console
from support.source_tree import Definition, resolve, steps_of

OPERATIONS = frozenset(name for concept in CONCEPTS for name in concept.operations)
each_example = pytest.mark.parametrize(
    "example", EXAMPLES, ids=lambda example: example.operation
)


def test_every_operation_has_an_example() -> None:
    for concept in CONCEPTS:
        named = [example.operation for example in examples_of(concept.name)]
        assert named == list(concept.operations or ["forward"])


@each_example
@pytest.mark.parametrize("twin", ["reference", "optimized"])
def test_an_example_shows_what_it_promises(example: Example, twin: str) -> None:
    if twin == "optimized" and torch.cuda.is_available():
        pytest.skip("its tensors are on the host: run once for all in the interpreter")
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
    """In the order of the code; of a class, in the order in which its methods are called."""
    told = [step.step for step in example.story if step.step]
    if example.operation == "forward":
        impl = Definition("reference.backends.backend", "ReferenceAttentionImpl")
        assert told == steps_of(impl, OPERATIONS, "forward")
        return
    (module,) = (
        concept.module
        for concept in CONCEPTS
        if example.operation in concept.operations
    )
    operation = resolve(f"reference.{module}", example.operation)
    assert operation is not None
    steps = steps_of(operation, OPERATIONS)
    if example.operation[0].isupper():
        told, steps = sorted(told), sorted(steps)
    assert told == steps


@each_example
def test_a_docstring_has_its_example_in_the_section_of_that_name(
    example: Example,
) -> None:
    assert any(output for _, output in example.calls)
    if example.operation == "forward":
        pytest.skip("a backend is many methods: its example is in none of them")
    operation = getattr(load_implementation("reference"), example.operation)
    before, _, section = (inspect.getdoc(operation) or "").partition("\nExample:\n")
    assert ">>>" not in before
    assert textwrap.indent(example.code.rstrip(), "    ") in section


def test_a_docstring_without_an_example_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twin = SimpleNamespace(undocumented=lambda: None)
    monkeypatch.setattr(story, "load_implementation", lambda name: twin)
    example = Example("undocumented", "No example.", ())
    with pytest.raises(ValueError, match="undocumented has no example"):
        _ = example.calls


@each_example
def test_an_example_is_told_in_sentences(example: Example) -> None:
    assert example.title.endswith(".")
    for step in example.story:
        assert step.text.endswith(".")


@pytest.mark.parametrize("concept", [concept.name for concept in CONCEPTS])
def test_an_explanation_fits_into_80_columns_and_shows_every_result(
    concept: str,
) -> None:
    printed = StringIO()
    explain(concept, Console(width=80, file=printed))
    text = printed.getvalue()
    lines = [line.rstrip() for line in text.splitlines()]
    # the length of a path depends on where the checkout is
    assert max(len(line) for line in lines if not line.endswith(".py")) <= 80
    for example in examples_of(concept):
        assert example.operation in text
        for _, shown in example.calls:
            for line in shown.splitlines():
                assert line.strip() in text


def test_an_unknown_concept_is_rejected_with_what_there_is() -> None:
    with pytest.raises(KeyError, match="expected one of block_table, slot_mapping"):
        explain("paging", Console(quiet=True))
