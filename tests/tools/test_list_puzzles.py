"""Puzzles on nested lists: the same answers are right, and the same mistakes get the same hints."""

import ast
import json
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from pagetwin.tools.puzzles import list_check
from pagetwin.tools.puzzles.check import load
from pagetwin.tools.puzzles.list_form import (
    TERMINAL_ONLY,
    list_form,
    on_lists,
)
from pagetwin.tools.puzzles.tasks import PUZZLES
from support.puzzle_answers import MISTAKES, mistaken, solution_of

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs once, on a machine without a GPU"
)

WITH_LISTS = {
    puzzle.name: puzzle for puzzle in PUZZLES if puzzle.name not in TERMINAL_ONLY
}
OF_TENSORS = ("strides", "dtype", "law")
"""Hints about what lists do not have."""
ANSWER = """
def slot_mapping(block_table, context_len, seq_len, start_idx, block_size):
    return [
        block_table[p // block_size] * block_size + p % block_size if p >= start_idx else -1
        for p in range(context_len, seq_len)
    ]
"""


@cache
def form_of(name):
    """Return the list form of a puzzle, as a browser reads it."""
    return json.loads(json.dumps(list_form(WITH_LISTS[name])))


def outcome_of(name, text, tmp_path):
    """Return the outcome of an answer on tensors, called with lists."""
    file = tmp_path / f"{name}.py"
    file.write_text(text)
    puzzle = WITH_LISTS[name]
    function = on_lists(puzzle, getattr(load(file), name))
    return list_check.check_function(form_of(name), function, text)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", WITH_LISTS)
def test_an_answer_is_right_on_lists_too_and_a_template_is_not_started(name, tmp_path):
    text = solution_of(name)
    assert outcome_of(name, text, tmp_path) == {"status": list_check.SOLVED}
    template = form_of(name)["template"]
    assert list_check.check(form_of(name), template)["status"] == list_check.NOT_STARTED
    assert "orch" not in template and "ensor(" not in template


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "hint", "texts"),
    [
        mistake
        for mistake in MISTAKES
        if mistake[0] in WITH_LISTS and mistake[1] not in OF_TENSORS
    ],
)
def test_a_mistake_gets_the_hint_of_the_terminal(name, hint, texts, tmp_path):
    outcome = outcome_of(name, mistaken(name, texts), tmp_path)
    assert (outcome["status"], outcome["hint"]) == (list_check.WRONG, hint), outcome


def parts_of(old, new):
    """Return what is shown for a changed answer to the first puzzle."""
    assert old in ANSWER
    data = json.dumps(form_of("slot_mapping"))
    return json.loads(list_check.check_text(data, ANSWER.replace(old, new)))


def test_what_is_shown_names_the_input_both_answers_and_the_line():
    assert parts_of("-1", "-1") == {"status": "solved"}
    wrong = dict(parts_of("p % block_size", "0")["parts"])
    assert wrong["yours"] != wrong["right"]
    assert wrong["where"][0].startswith("slots at token ")
    raised = dict(parts_of("block_table[p ", "block_table[9 + p ")["parts"])
    assert raised["error"] == [
        "IndexError: list index out of range",
        "in line 4: block_table[9 + p // block_size] * block_size + p % block_size if p >="
        " start_idx else -1",
    ]
    misspelt = dict(parts_of("return [", "return ]")["parts"])
    assert misspelt["error"][0].startswith("SyntaxError") and misspelt["error"][1]
    unnamed = dict(parts_of("def slot_mapping", "def slots")["parts"])
    assert unnamed["error"] == ["The text defines no function slot_mapping."]
    nothing = parts_of("    return [", "    _ = [")
    assert nothing["hint"] == "count"


ENDLESS = "def slot_mapping(**_):\n    found = []\n    found.append(found)\n    return found\n"
ODD = {
    "exit": ("import sys\ndef slot_mapping(**_): sys.exit(3)", "error"),
    "exit at once": ("raise SystemExit", "error"),
    "a long integer": ("def slot_mapping(**_): return [10**400]", "idea"),
    "no number": ("def slot_mapping(**_): return [None]", "idea"),
    "a list of itself": (ENDLESS, "shape"),
    "no function": ("slot_mapping = 3", "error"),
    "no end": ("def slot_mapping(**_):", "error"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_answer_gets_a_hint_and_ends_no_check(name):
    text, hint = ODD[name]
    outcome = list_check.check(form_of("slot_mapping"), text)
    assert (outcome["status"], outcome["hint"]) == (list_check.WRONG, hint), outcome
    json.dumps(outcome)


def test_a_long_integer_is_not_equal_to_a_float():
    assert not list_check.is_equal(10**400, 1.0)


def test_the_check_in_the_browser_needs_only_the_standard_library():
    tree = ast.parse(Path(list_check.__file__).read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names


@pytest.mark.extended
def test_the_forms_are_small():
    assert max(len(json.dumps(form_of(name))) for name in WITH_LISTS) < 200_000
