"""Puzzles: right answers are accepted, and each usual mistake gets its own hint."""

import doctest
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pagetwin.contract.operations import CONCEPTS
from pagetwin.tools.cli import DISAGREE, USER_ERROR, app
from pagetwin.tools.puzzles.check import NOT_STARTED, SOLVED, WRONG, check_file, load
from pagetwin.tools.puzzles.folder import write
from pagetwin.tools.puzzles.runner import check_folder
from pagetwin.tools.puzzles.tasks import PUZZLES
from support.puzzle_answers import MISTAKES, mistaken, solution_of
from typer.testing import CliRunner

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs once, on a machine without a GPU"
)

HERE = Path(__file__).parent
SECONDS_OF_A_CHECK = 5.0
BY_NAME = {puzzle.name: puzzle for puzzle in PUZZLES}
EACH = pytest.mark.parametrize("puzzle", PUZZLES, ids=BY_NAME)


@pytest.fixture
def pagetwin(tmp_path, monkeypatch):
    """Return a function that runs a command in an empty folder, 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: str):
        return CliRunner().invoke(app, ["puzzles", *words])

    return run


@pytest.mark.sample(2)
@pytest.mark.quick
@EACH
def test_a_right_answer_is_accepted_in_less_than_five_seconds(puzzle, tmp_path):
    file = tmp_path / puzzle.file
    file.write_text(solution_of(puzzle.name))
    began = time.process_time()
    outcome = check_file(puzzle, file)
    assert outcome.status == SOLVED, outcome
    assert time.process_time() - began < SECONDS_OF_A_CHECK


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "hint", "texts"),
    MISTAKES,
    ids=[f"{name}-{hint}" for name, hint, _ in MISTAKES],
)
def test_a_usual_mistake_gets_its_own_hint(name, hint, texts, tmp_path):
    puzzle = BY_NAME[name]
    file = tmp_path / puzzle.file
    file.write_text(mistaken(name, texts))
    began = time.process_time()
    outcome = check_file(puzzle, file)
    assert (outcome.status, outcome.hint) == (WRONG, hint), outcome
    assert outcome.case and outcome.difference and outcome.hint_text
    assert time.process_time() - began < SECONDS_OF_A_CHECK


@EACH
def test_each_puzzle_has_three_mistakes_and_each_hint_is_given_once(puzzle):
    given = {hint for name, hint, _ in MISTAKES if name == puzzle.name}
    assert len(given) >= 3
    assert {hint.name for hint in puzzle.hints} <= given


@pytest.mark.quick
@EACH
def test_the_worked_example_is_right(puzzle, tmp_path):
    file = tmp_path / f"solution_{puzzle.file}"
    file.write_text(solution_of(puzzle.name))
    solved = vars(load(file))
    (tmp_path / puzzle.file).write_text(puzzle.template)
    module = load(tmp_path / puzzle.file)
    function = getattr(module, "decode_kernel", None) or getattr(module, puzzle.name)
    text = (function.fn if hasattr(function, "fn") else function).__doc__
    assert "Example:" in text
    example = doctest.DocTestParser().get_doctest(
        text, vars(module) | solved, puzzle.name, None, 0
    )
    assert bool(example.examples) != (puzzle.name == "decode")
    runner = doctest.DocTestRunner(verbose=False)
    assert runner.run(example).failed == 0


@pytest.mark.quick
@EACH
def test_a_template_has_no_body_and_imports_only_torch_and_triton(puzzle, tmp_path):
    assert puzzle.template.count("raise NotImplementedError") == 1
    imported = {
        line.split()[1].split(".")[0]
        for line in puzzle.template.splitlines()
        if line.startswith(("import ", "from "))
    }
    kernels = {"triton"} if puzzle.name == "decode" else set()
    assert imported - {"collections"} == {"torch"} | kernels
    file = tmp_path / puzzle.file
    file.write_text(f"{puzzle.template}\n# changed\n")
    assert check_file(puzzle, file).status == NOT_STARTED
    compile(puzzle.template, puzzle.file, "exec")
    assert all(len(line) <= 100 for line in puzzle.template.splitlines())


@pytest.mark.quick
@EACH
def test_the_page_of_a_puzzle_exists(puzzle):
    kind, _, name = puzzle.page.partition("/")
    assert (HERE.parents[1] / "docs" / f"{puzzle.page}.md").is_file()
    assert kind != "concepts" or name in {concept.name for concept in CONCEPTS}


def test_files_that_were_changed_are_kept_and_nothing_is_written(pagetwin, tmp_path):
    assert pagetwin("here", "1", "gather").exit_code == 0
    names = {"01_slot_mapping.py", "03_gather.py"}
    folder = tmp_path / "here"
    assert {file.name for file in folder.iterdir()} == names
    (folder / "03_gather.py").write_text("mine")
    result = pagetwin("here")
    assert result.exit_code == USER_ERROR
    assert "03_gather.py" in result.output and "Nothing was written" in result.output
    assert {file.name for file in folder.iterdir()} == names
    assert (folder / "03_gather.py").read_text() == "mine"
    assert pagetwin("here", "gqa", "slot_mapping").exit_code == 0
    assert (folder / "07_gqa.py").read_text() == BY_NAME["gqa"].template


def test_a_write_that_fails_leaves_no_file(tmp_path, monkeypatch):
    folder = tmp_path / "new"
    rename = Path.rename

    def fails_at_the_third(self, target):
        if target.name.startswith("03"):
            raise OSError("disk is full")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_at_the_third)
    with pytest.raises(OSError, match="full"):
        write(folder, PUZZLES)
    assert not folder.exists()


@pytest.mark.long
def test_a_loop_or_a_crash_ends_only_its_own_check(tmp_path):
    chosen = [BY_NAME[name] for name in ("slot_mapping", "gather", "gqa", "decode")]
    for puzzle in chosen:
        (tmp_path / puzzle.file).write_text(solution_of(puzzle.name))
    head = "def slot_mapping(**arguments):\n    "
    (tmp_path / "01_slot_mapping.py").write_text(f"{head}while True: pass\n")
    head = "import os\ndef gather(**arguments):\n    "
    (tmp_path / "03_gather.py").write_text(f"{head}os._exit(7)\n")
    outcomes = {
        puzzle.name: outcome
        for puzzle, outcome in check_folder(tmp_path, chosen, seconds_of_a_puzzle=15)
    }
    assert outcomes["slot_mapping"].hint == "time"
    assert "more than 15 seconds" in outcomes["slot_mapping"].difference
    assert outcomes["gather"].hint == "crash"
    assert "code 7" in outcomes["gather"].difference
    assert outcomes["gqa"].status == outcomes["decode"].status == SOLVED
    assert not (tmp_path / "__pycache__").exists()


@pytest.mark.extended
@pytest.mark.quick
def test_the_check_prints_the_counterexample_and_where_it_differs(pagetwin, tmp_path):
    assert pagetwin("mine", "1", "2", "4").exit_code == 0
    wrong = solution_of("causal_mask").replace("<=", "<")
    (tmp_path / "mine" / "04_causal_mask.py").write_text(wrong)
    right = solution_of("slot_mapping")
    (tmp_path / "mine" / "01_slot_mapping.py").write_text(right)
    result = pagetwin("--check", "mine")
    assert result.exit_code == DISAGREE
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    for line in (
        "1 slot_mapping solved",
        "2 append_blocks not started",
        "4 causal_mask wrong",
        "input query_len = 1",
        "yours mask = [[0]]",
        "where mask at query 0, key 0: yours 0, right 1",
        "1 of 3 solved.",
    ):
        assert line in lines, result.output
    assert "A token attends to itself too" in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert pagetwin("--check", "mine", "1").exit_code == 0
    result = pagetwin("--check", "mine", "gqa")
    assert result.exit_code == USER_ERROR and "07_gqa.py" in result.output


def with_first_line(text: str, line: str) -> tuple[str, int]:
    """Return a solution whose computing function begins with a line, and that line's number."""
    lines = text.splitlines(keepends=True)
    at = next(
        number
        for number, line in enumerate(lines)
        if line.startswith(("def ", "@triton.jit"))
    )
    body = next(
        number for number in range(at, len(lines)) if lines[number].endswith(":\n")
    )
    lines.insert(body + 1, f"    {line}\n")
    return "".join(lines), body + 2


@pytest.mark.sample(3)
@pytest.mark.parametrize("line", ["undefined_name", "1 // 0"])
@EACH
def test_an_error_in_an_answer_is_shown_once_with_its_line(
    puzzle, line, pagetwin, tmp_path
):
    """A folder is relative to the current one, and the kernel runs in the interpreter."""
    text, number = with_first_line(solution_of(puzzle.name), line)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / puzzle.file).write_text(text)
    outcome = check_file(puzzle, Path("mine") / puzzle.file)
    assert (outcome.status, outcome.hint) == (WRONG, "error")
    error, where = outcome.difference.split("\n")
    assert error.split(":")[0] in ("NameError", "ZeroDivisionError")
    assert where == f"in line {number} of {puzzle.file}: {line}"
    assert not outcome.found and outcome.right


@pytest.mark.extended
def test_an_error_in_a_kernel_is_printed_once(pagetwin, tmp_path):
    text, number = with_first_line(solution_of("decode"), "undefined_name")
    (tmp_path / "12_decode.py").write_text(text)
    shown = " ".join(pagetwin("--check", "./12_decode.py").output.split())
    assert shown.count("NameError") == 1 and "InterpreterError" not in shown
    assert f"in line {number} of 12_decode.py: undefined_name" in shown


@pytest.mark.extended
@pytest.mark.parametrize(
    "puzzle",
    [puzzle for puzzle in PUZZLES if puzzle.laws],
    ids=lambda puzzle: puzzle.name,
)
def test_an_error_that_only_a_law_meets_has_its_line_and_no_other_hint(
    puzzle, tmp_path
):
    text, number = with_first_line(solution_of(puzzle.name), "undefined_name")
    file = tmp_path / puzzle.file
    file.write_text(text)
    outcome = check_file(replace(puzzle, cases=list), file)
    assert outcome.law in puzzle.laws and outcome.hint == "error"
    assert f"\nin line {number} of {puzzle.file}" in outcome.difference


def test_an_error_of_the_call_itself_or_of_the_import_has_its_line(tmp_path):
    for text, number in (
        ("# gqa\n\ndef gqa(query, key): return query\n", 3),
        ("import torch\nimport nosuchmodule\n", 2),
    ):
        file = tmp_path / BY_NAME["gqa"].file
        file.write_text(text)
        assert f"\nin line {number} of" in check_file(BY_NAME["gqa"], file).difference


@EACH
def test_a_docstring_says_which_strides_the_tensors_have(puzzle):
    has_tensors = any(
        isinstance(value, torch.Tensor)
        for case in puzzle.cases()
        for value in case.values()
    )
    assert puzzle.has_strides == ("any strides" in puzzle.template)
    if has_tensors and not puzzle.has_strides:
        assert "contiguous tensors" in puzzle.template


@pytest.mark.extended
def test_who_solved_all_is_shown_folders_that_exist(pagetwin, tmp_path):
    (tmp_path / "07_gqa.py").write_text(solution_of("gqa"))
    shown = "".join(pagetwin("--check", "gqa").output.split())
    found = re.search("thecodein(/.*reference)and(/.*optimized)[.]", shown)
    assert found and all(Path(group).is_dir() for group in found.groups())


@pytest.mark.quick
def test_an_unknown_puzzle_is_an_error_that_lists_all(pagetwin):
    result = pagetwin("--check", "mine", "flash")
    assert result.exit_code == USER_ERROR
    assert "'flash'" in result.output and "12 decode" in result.output


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("def gqa(:\n", "file"),
        ("def attention(): pass\n", "name"),
        ("def gqa(query, key, value, scale): return key / 0 * undefined\n", "error"),
        ("def gqa(query, key, value, scale): return 3\n", "type"),
        ("def gqa(query, key, value, scale): return query * 0\n", "idea"),
    ],
)
def test_other_failures_get_a_general_hint(text, hint, tmp_path):
    file = tmp_path / BY_NAME["gqa"].file
    file.write_text(text)
    outcome = check_file(BY_NAME["gqa"], file)
    assert (outcome.status, outcome.hint) == (WRONG, hint)
