"""Wrong command lines: each is one sentence and exit code 2, before torch is imported.

The values are tried on every option and argument of every command, found by inspection.
"""

import inspect
import json
import os
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pagetwin.conformance.laws.all_laws import ALL_LAWS
from pagetwin.conformance.running.law_names import law_names
from pagetwin.tools import bench_names
from pagetwin.tools.bench.libraries import all_libraries
from pagetwin.tools.cli import USER_ERROR, app
from pagetwin.tools.puzzles import folder as puzzle_folder
from pagetwin.tools.puzzles.tasks import PUZZLES

pytestmark = pytest.mark.long

COMMANDS = {
    command.callback.__name__: command.callback for command in app.registered_commands
}
NEEDED: dict[str, dict[str, str]] = {
    "check": {"module": "reference"},
    "fuzz": {"module": "reference"},
    "export": {"folder": "out"},
    "bench": {"smoke": "--smoke", "device": "--device=cpu"},
    "replay": {"device": "--device=cpu"},
}
"""What else a command line has, so that nothing but the value that is tried is wrong."""
LONG = "a" * 300
OUTPUTS = {
    "json_file": ".json", "markdown": ".md", "junit": ".xml", "html": ".html",
    "report": ".html", "plot": ".svg", "trace": ".jsonl", "out": ".json",
}  # fmt: skip
INPUTS = {
    "file": ".pt", "solution": ".json", "fa3": ".so", "flashmla": ".so", "model": ".json"
}  # fmt: skip
FOLDERS = ("folder", "corpus")
ZERO = ("seed", "signatures", "splits")
"""Numbers that may be 0."""
ANY_WORDS = ("commit",)
"""Options that take any words."""
NUMBERS = ("-1", "x", "", "9" * 20, "1e400")
BAD_NAMES = ("nosuch", "", "no such, words", "./adir/", "/dev/full", LONG)

RUN = """
import json, sys
class NoTorch:
    tried = False
    def find_spec(self, name, *rest):
        if name.partition('.')[0] in ('torch', 'triton', 'numpy', 'hypothesis.strategies'):
            NoTorch.tried = True
            raise ImportError(f'{name} was imported')
sys.meta_path.insert(0, NoTorch())
from typer.testing import CliRunner
from pagetwin.tools.cli import app
for line in sys.stdin:
    NoTorch.tried = False
    found = CliRunner().invoke(app, json.loads(line))
    error = '' if isinstance(found.exception, SystemExit) else repr(found.exception)
    print(json.dumps([found.exit_code, found.output, error, NoTorch.tried]), flush=True)
"""


def parameters(command: str) -> Iterator[tuple[str, type, str | None]]:
    """Yield name, type and option of each parameter; no option for an argument."""
    hints = typing.get_type_hints(COMMANDS[command], include_extras=True)
    for name in inspect.signature(COMMANDS[command]).parameters:
        if name == "context":
            continue
        plain, info = typing.get_args(hints[name])
        if isinstance(plain, types.UnionType):
            plain = next(
                member for member in typing.get_args(plain) if member is not type(None)
            )
        if typing.get_origin(plain) is list:
            (plain,) = typing.get_args(plain)
        is_option = type(info).__name__ == "OptionInfo"
        declared = [
            declaration
            for declaration in (info.param_decls or ())
            if declaration[:2] == "--"
        ]
        option = (declared or [f"--{name.replace('_', '-')}"])[0]
        yield name, plain, option if is_option else None


def bad_values(name: str, kind: type) -> Iterator[str]:
    """Yield values that a parameter must not take."""
    if kind is int:
        yield from (*NUMBERS, "1.5", *(() if name in ZERO else "0"))
    elif kind is float:
        yield from (*NUMBERS, "0", "nan", "inf", "-inf")
    elif kind is str:
        names = BAD_NAMES if name not in ANY_WORDS else ("",)
        # a folder is what the first word of `puzzles` may be
        yield from (
            known_name
            for known_name in names
            if (name, known_name) != ("words", "./adir/")
        )
    elif name in OUTPUTS and kind is Path:
        end = OUTPUTS[name]
        yield from ("", "adir", f"no/such{end}", f"file/x{end}", f"/proc/x{end}")
        yield from ("/dev/full", "/dev/zero", "pipe", "loop", "page.pdf", LONG + end)
    elif name in INPUTS:
        yield from ("", "adir", "file", f"nosuch{INPUTS[name]}", "/dev/full", LONG)
    elif name in FOLDERS:
        yield from ("", "file", "file/x", "/proc/x", "/dev/full", f"x/{LONG}", "loop")
    else:
        assert kind is bool, f"{name}: expected bad values for it here"


def lines() -> Iterator[list[str]]:
    """Yield command lines, each with one value that is wrong."""
    for command in COMMANDS:
        for name, kind, option in parameters(command):
            needed = [
                word
                for other, word in NEEDED.get(command, {}).items()
                if other != name and (name, other) != ("solution", "module")
            ]
            for value in bad_values(name, kind):
                if option is None:
                    # --: an argument may begin with a hyphen
                    yield [command, *needed, "--", value]
                else:
                    yield [command, *needed, option, value]
                    if value and not value.startswith("-"):
                        yield [command, *needed, f"{option}={value}"]
            if option is not None and kind is not bool:
                yield [command, *needed, option]
                yield [command, *needed, f"{option}="]


TOGETHER = (
    "check reference --probe --only slot",
    "check reference --probe --json x.json",
    "check reference --probe --seed 3 --examples 2",
    "check reference --trace t.jsonl",
    "check reference --solution x.json",
    "check",
    "check ./adir/",
    "check file",
    "check .",
    "check reference --known a=b --known a=c",
    "check reference --known a",
    "check reference --json x --markdown x",
    "replay --twins reference,reference",
    "replay --twins reference,",
    "replay --twins ,",
    "replay --query-heads 3 --kv-heads 2",
    "replay --splits 2",
    "replay --ranks 2 --splits 3",
    "replay --json same.html --report same.html",
    "replay --num-blocks 100000000000",
    "replay --kv-heads 1000000 --query-heads 1000000",
    "replay --head-size 7777",
    "replay --device cuda:1",
    "bench nosuch",
    "bench --suite nosuch",
    "bench decode-64x4",
    "bench --device cpu",
    "bench --implementations ours,ours",
    "bench --implementations ours --fa3 lib.so",
    "bench --flashmla lib.so",
    "bench --commit 0123",
    "bench --plot x.svg --json x-dark.svg",
    "export out --definition gqa_ragged_decode_h3_kv2_d8",
    "export out --definition gqa_ragged_decode_h1024_kv1024_d9999999",
    "puzzles slotmaping",
    "puzzles slotmaping gqa",
    "puzzles nosuch",
    "puzzles 0",
    "puzzles 13",
    "puzzles --check 13",
    "puzzles --check slot_maping",
    "puzzles gqa nosuch",
    "puzzles file",
    "puzzles ./file gqa",
    "puzzles a/01_slot_mapping.py b/02_append_blocks.py",
    "puzzles --check ./nosuch",
    "reproduce",
    "reproduce a.pt b.pt",
    "explain slots mapping",
    "nosuch",
    "replai",
    "--nosuch",
)
"""Arguments that contradict each other, or one of which would be ignored; and more."""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a function that runs a command line in a process that cannot import torch."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "adir").mkdir()
    (folder / "file").write_text("words\n")
    (folder / "lib.so").touch()
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    running = subprocess.Popen(
        [sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, cwd=folder,
    )  # fmt: skip
    assert running.stdin is not None and running.stdout is not None
    before = sorted(folder.rglob("*"))

    def run(words: list[str]) -> str:
        assert running.stdin is not None and running.stdout is not None
        running.stdin.write(json.dumps(words) + "\n")
        running.stdin.flush()
        code, output, error, has_imported = json.loads(running.stdout.readline())
        assert not has_imported, f"{words} imports torch: {output}"
        assert code == USER_ERROR and not error, (words, code, output, error)
        assert len(output.strip().splitlines()) == 1, output
        assert "Traceback" not in output and "[Errno" not in output, output
        assert sorted(folder.rglob("*")) == before, words
        return str(output)

    yield run
    running.stdin.close()
    running.wait()


def test_every_wrong_value_of_every_option_is_one_sentence(process: Any) -> None:
    tried = list(lines())
    assert len(tried) > 500
    for words in tried:
        process(words)


@pytest.mark.parametrize("line", TOGETHER)
def test_arguments_that_do_not_fit_together_are_one_sentence(
    process: Any, line: str
) -> None:
    process(line.split())


def test_a_wrong_puzzle_is_answered_with_the_nearest_names(process: Any) -> None:
    assert "did you mean slot_mapping?" in process(["puzzles", "slotmaping"])
    assert "did you mean causal_mask?" in process(["puzzles", "--check", "casual-mask"])
    assert "12 decode" in process(["puzzles", "13"])


def test_names_that_are_known_without_torch_are_those_of_the_code() -> None:
    assert set(law_names()) == {(law.area, law.name) for law in ALL_LAWS}
    assert [puzzle.name for puzzle in PUZZLES] == list(puzzle_folder.NAMES)
    assert [puzzle.file for puzzle in PUZZLES] == list(puzzle_folder.FILES)
    standard = [library.name for library in all_libraries("cpu")]
    assert standard == list(bench_names.IMPLEMENTATIONS)
    everything = {library.name for library in all_libraries("cpu", suite="all")}
    assert everything - set(standard) == set(bench_names.BEYOND_STANDARD)
