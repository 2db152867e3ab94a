"""Does the command line do what it says, and say what went wrong?"""

import builtins
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from pagetwin.contract.operations import CONCEPTS
from pagetwin.tools.cli import DISAGREE, USER_ERROR, app
from pagetwin.tools.files import whole_file, write_text
from typer.testing import CliRunner

SMALL = ("--device", "cpu", "--requests", "6", "--twins", "reference")


def is_installed() -> bool:
    try:
        importlib.metadata.version("pagetwin")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture
def pagetwin(tmp_path, monkeypatch):
    """Return a function that runs a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*words: object):
        return CliRunner().invoke(app, [str(word) for word in words])

    return run


def write_twin(folder: Path, name: str, broken: str = "") -> None:
    """Write a package that is the reference except for what `broken` defines."""
    package = folder / name
    package.mkdir()
    (package / "__init__.py").touch()
    for concept in CONCEPTS:
        source = f"from pagetwin.reference.{concept.module} import *\n"
        if concept.name == "paged_attention":
            source += broken
        file = package.joinpath(*concept.module.split(".")).with_suffix(".py")
        file.parent.mkdir(exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(source)


DROPS_THE_FIRST_KEY = textwrap.dedent(
    """
    import pagetwin.reference.attention.paged as right
    from pagetwin.contract.attention_options import pack_options

    def paged_attention(query, key_cache, value_cache, block_table, *rest, **options):
        key_cache = key_cache.clone()
        key_cache[block_table[:, 0].long(), 0] = 0
        return right.paged_attention(
            query, key_cache, value_cache, block_table, *rest, **pack_options(**options)
        )
    """
)


@pytest.mark.extended
def test_a_replay_ends_with_tables_figures_and_a_page(pagetwin, tmp_path):
    result = pagetwin(
        "replay", *SMALL, "--json", "figures.json", "--report", "page.html"
    )
    assert result.exit_code == 0, result.output
    for words in ("prefill tokens", "prefix hits", "preemptions"):
        assert words in result.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["requests"] == figures["requests_finished"] == 6
    assert figures["settings"]["twins"] == ["reference"]
    assert figures["agreement"]["reference"]["worst_share_of_budget"] <= 1
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "figures.json",
        "page.html",
    ]


@pytest.mark.extended
def test_twins_agree_only_if_two_of_them_ran(pagetwin, tmp_path, monkeypatch):
    """A replay of the reference alone once ended with "The twins agree"."""
    monkeypatch.syspath_prepend(tmp_path)
    write_twin(tmp_path, "another_twin")
    small = ("replay", "--device", "cpu", "--requests", "3", "--twins")
    result = pagetwin(*small, "reference")
    assert result.exit_code == 0, result.output
    assert "The twins agree" not in result.output
    assert "No twins were compared" in result.output
    two = pagetwin(*small, "reference,another_twin")
    assert re.search(r"The twins agree in all \d+ steps", two.output), two.output


@pytest.mark.extended
def test_a_replay_on_two_ranks_says_that_they_agree_with_one(pagetwin, tmp_path):
    small = ("--device", "cpu", "--requests", "2", "--twins", "reference")
    result = pagetwin("replay", *small, "--ranks", "2", "--json", "f.json")
    assert result.exit_code == 0, result.output
    end = "One rank and 2 ranks gave results within the error budget in every step."
    assert end in result.output
    figures = json.loads((tmp_path / "f.json").read_text())
    assert list(figures["agreement"]) == ["reference", "reference on 2 ranks"]
    bits = pagetwin("replay", *small, "--ranks", "2", "--splits", "2")
    assert "One rank and 2 ranks gave the same bits in every step" in bits.output


@pytest.mark.extended
def test_steps_have_one_numbering(pagetwin, tmp_path):
    """The progress bar began at 0 and skipped idle times; the table counted."""
    result = pagetwin("replay", *SMALL, "--json", "f.json")
    assert result.exit_code == 0, result.output
    steps = json.loads((tmp_path / "f.json").read_text())["steps"]
    assert re.search(rf"step {steps}: \d+ running", result.output)
    assert f"in all {steps} steps" in result.output


@pytest.mark.extended
def test_the_table_says_what_was_scaled_and_by_how_much(pagetwin, tmp_path):
    result = pagetwin("replay", *SMALL, "--json", "f.json")
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "f.json").read_text())
    here, there = figures["lengths"], figures["lengths_in_trace"]
    for name, scale in (("prompt", "1/64"), ("output", "1/32")):
        tokens = f"{name}_tokens"
        assert here[tokens] < there[tokens]
        row = next(line for line in result.output.splitlines() if f"{name} tok" in line)
        assert f"{here[tokens]:,}" in row
        assert f"of {there[tokens]:,} in the trace, scaled by {scale}" in row
    full = pagetwin(
        "replay",
        "--twins",
        "reference",
        "--trace",
        "azure",
        "--requests",
        1,
        "--scale",
        1,
        "--output-scale",
        1,
    )
    assert full.output.count("as in the trace") == 2, full.output


@pytest.mark.extended
def test_the_page_loads_nothing(pagetwin, tmp_path):
    assert pagetwin("replay", *SMALL, "--report", "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"<script|<link|<iframe|@import|url\(", page)
    for address in re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)""", page):
        assert address.startswith("data:")
    assert "http" not in re.sub(r"base64,[A-Za-z0-9+/=]+", "", page)


@pytest.mark.extended
def test_the_default_traffic_shows_what_the_page_explains(pagetwin, tmp_path):
    result = pagetwin(
        "replay", "--device", "cpu", "--twins", "reference", "--json", "f.json"
    )
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["preemptions"] >= 2
    assert figures["tokens"]["recomputed"] > 0
    assert figures["tokens"]["found_in_prefix_cache"] > 0
    assert figures["waiting_at_most"] > 0


def test_a_disagreement_ends_with_one_and_can_be_reproduced(
    pagetwin, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    write_twin(tmp_path, "twin_without_first_key", DROPS_THE_FIRST_KEY)
    result = pagetwin(
        "replay",
        "--device",
        "cpu",
        "--requests",
        6,
        "--twins",
        "reference,twin_without_first_key",
    )
    assert result.exit_code == DISAGREE, result.output
    assert "The twins disagree." in result.output
    assert "attention stays within its error budget" in result.output
    assert "expected" in result.output
    (path,) = tmp_path.glob("*.pt")
    assert f"pagetwin reproduce {path.name}" in result.output
    assert "Traceback" not in result.output
    again = pagetwin("reproduce", path)
    assert again.exit_code == DISAGREE, again.output
    assert "The step is still wrong." in again.output
    monkeypatch.setattr(
        "twin_without_first_key.attention.paged.paged_attention",
        importlib.import_module("pagetwin.reference.attention.paged").paged_attention,
    )
    fixed = pagetwin("reproduce", path)
    assert fixed.exit_code == 0, fixed.output
    assert "The step is right now." in fixed.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--trace", "nowhere.csv"], "nowhere.csv"),
        (["--trace", "empty.jsonl"], "empty.jsonl holds no requests"),
        (["--trace", "bad.jsonl"], "bad.jsonl, line 3"),
        (["--scale", "0"], "scale = 0"),
        (["--requests", "0"], "requests = 0"),
        (["--twins", "nothing"], "twin = 'nothing'"),
        (["--twins", ","], "twins"),
        (["--query-heads", "3"], "query_heads = 3"),
        (["--num-blocks", "3"], "num_blocks = 3: request"),
        (["--num-blocks", "0"], "num_blocks = 0"),
        (["--block-size", "0"], "block_size = 0"),
        (["--dtype", "int8"], "dtype = 'int8'"),
        (["--seed", "-1"], "seed = -1"),
        (["--device", "tpu"], "device = 'tpu'"),
        (["--report", "no/such/folder.html"], "no/such/folder.html"),
        (["--json", "no/such/folder.json"], "no/such/folder.json"),
        (["--json", "."], "json = . is a folder"),
        (["--report", "."], "report = . is a folder"),
        (["--json", "/proc/figures.json"], "no file can be created in /proc"),
        (["--json", "x", "--report", "x"], "json and report are both x"),
        (["--output-scale", "2"], "output_scale = 2"),
        (["--ranks", "0"], "ranks = 0: expected at least 1"),
        (["--ranks", "8"], "query_heads = 4 is not a multiple of ranks = 8"),
        (["--ranks", "2", "--splits", "3"], "splits = 3: expected 0 or a multiple"),
        (["--ranks", "2", "--twins", "triton"], "does not run on several ranks"),
    ],
)
def test_what_the_user_can_fix_is_one_sentence(pagetwin, tmp_path, words, sentence):
    good = '{"timestamp":0,"input_length":5,"output_length":2,"hash_ids":[3]}\n'
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "bad.jsonl").write_text(good + good + "{oops\n")
    result = pagetwin("replay", *SMALL, *words)
    assert result.exit_code == USER_ERROR, result.output
    assert sentence in result.output
    assert "Traceback" not in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_file_is_written_completely_or_not_at_all(tmp_path):
    path, link = tmp_path / "figures.json", tmp_path / "link.json"
    path.write_text("old")
    link.symlink_to(path)
    with pytest.raises(RuntimeError), whole_file(link) as unfinished:
        unfinished.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    write_text(link, "new")
    assert link.is_symlink() and path.read_text() == "new"
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, link.name]
    write_text(Path("/dev/null"), "a device is not replaced")
    assert Path("/dev/null").is_char_device()


def test_a_trace_of_ones_own_runs(pagetwin, tmp_path):
    lines = [
        f'{{"timestamp":{n},"input_length":900,"output_length":99,"hash_ids":[1,{n}]}}'
        for n in range(3)
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    result = pagetwin("replay", "--trace", "mine.jsonl", "--twins", "reference")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("library", ["jinja2", "matplotlib"])
def test_a_report_without_its_libraries_is_rejected_before_the_replay(
    pagetwin, monkeypatch, library
):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == library else find_spec(name, *rest),
    )
    result = pagetwin("replay", *SMALL, "--report", "page.html")
    assert result.exit_code == USER_ERROR
    assert f"a report needs {library}" in result.output
    assert "pip install 'pagetwin[report]'" in result.output


@pytest.mark.extended
def test_a_replay_without_a_report_needs_no_drawing(pagetwin, monkeypatch):
    real = builtins.__import__

    def guarded(name, *rest, **options):
        assert name.split(".")[0] not in ("jinja2", "matplotlib")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", guarded)
    assert pagetwin("replay", *SMALL).exit_code == 0


def test_a_damaged_file_cannot_be_reproduced(pagetwin, tmp_path):
    (tmp_path / "step.pt").write_bytes(b"nonsense")
    # torch.load raises an IndexError for these bytes, which once was a traceback and exit code 1
    (tmp_path / "notes.txt").write_bytes(b". notes")
    (tmp_path / "folder").mkdir()
    for name, sentence in (
        ("step.pt", "not a stored step"),
        ("notes.txt", "not a stored step"),
        ("folder", "is not a file"),
        ("none.pt", "expected"),
    ):
        result = pagetwin("reproduce", name)
        assert result.exit_code == USER_ERROR, result.output
        assert sentence in result.output
        assert "Traceback" not in result.output
        assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["slot_mapping", "slot-mapping", "Slot Mapping"])
def test_a_concept_is_explained_from_files_that_exist(pagetwin, name):
    """The paths were those of a checkout, which a wheel does not have."""
    result = pagetwin("explain", name)
    assert result.exit_code == 0, result.output
    assert "block" in result.output
    modules = re.findall(r"Source: (\S+)\n\s+(\S+)", result.output)
    assert [module for module, _ in modules] == [
        "pagetwin.reference.cache.slot_mapping",
        "pagetwin.optimized.cache.slot_mapping",
    ]
    for module, path in modules:
        assert importlib.util.find_spec(module) and Path(path).is_file()


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("slots", "slot_mapping"),
        ("slot-maping", "slot_mapping"),
        ("reshape_and_cache", "cache_ops"),
        ("mla-attention", "paged_attention"),
    ],
)
def test_an_unknown_concept_ends_with_close_ones(pagetwin, name, close):
    result = pagetwin("explain", name)
    assert result.exit_code == USER_ERROR
    assert f"concept = {name!r} does not exist: did you mean" in result.output
    assert close in result.output and "`pagetwin explain` lists" in result.output


def test_explain_alone_lists_every_concept_in_one_line(pagetwin):
    result = pagetwin("explain")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    for concept, line in zip(CONCEPTS, lines, strict=False):
        assert line.split() == [concept.name, *concept.summary.split()]


@pytest.mark.quick
@pytest.mark.parametrize(
    "command", [registered.callback.__name__ for registered in app.registered_commands]
)
def test_help_names_every_exit_code(pagetwin, command):
    result = pagetwin(command, "--help")
    words = " ".join(result.output.split())
    assert "Exit codes: 0, " in words and " 2, " in words, words


@pytest.mark.sample(8)
@pytest.mark.quick
@pytest.mark.parametrize("width", [60, 80, 100, 120])
@pytest.mark.parametrize(
    "command",
    ["", *(registered.callback.__name__ for registered in app.registered_commands)],
)
def test_help_fills_its_lines_at_any_width(
    pagetwin, monkeypatch, command: str, width: int
) -> None:
    """Docstrings were wrapped at 95, and then again at 80."""
    monkeypatch.setenv("COLUMNS", str(width))
    lines = pagetwin(*command.split(), "--help").output.splitlines()
    assert max(map(len, lines)) <= width
    usage, *_ = (number for number, line in enumerate(lines) if "Usage:" in line)
    end, *_ = (number for number, line in enumerate(lines) if line.startswith("╭"))
    words = [line.strip() for line in lines[usage + 1 : end]]
    for line, following in itertools.pairwise(words):
        if line and following:
            # what begins the next line did not fit: one column is left free on each side
            assert len(f"{line} {following.split()[0]}") > width - 2, line


@pytest.mark.quick
@pytest.mark.skipif(
    not is_installed(), reason="pagetwin is imported from a checkout, not installed"
)
def test_the_version_is_the_installed_one(pagetwin):
    result = pagetwin("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"pagetwin \d+\.\d+\.\d+\S*\n", result.output)


def test_the_command_runs_where_the_package_is_not_installed():
    done = subprocess.run(
        [sys.executable, "-m", "pagetwin", "explain", "no_such_concept"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == USER_ERROR, done.stderr
    assert "no_such_concept" in done.stderr


@pytest.mark.quick
def test_help_imports_nothing_heavy():
    """`--help` once took the seconds that torch needs to be imported."""
    script = (
        "import sys; from pagetwin.tools.cli import app\n"
        "try:\n    app(['replay', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'triton', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--token-budget" in done.stdout


@pytest.mark.extended
def test_commands_import_what_they_run():
    """Neither a twin before a command needs one, nor the optimized twin for bookkeeping."""
    script = (
        "import sys, pagetwin.tools.cli\n"
        "found = [n for n in sys.modules if n.startswith(('pagetwin.reference', 'torch'))]\n"
        "assert not found, found\n"
        "import pagetwin.tools.replay.run\n"
        "import pagetwin.tools.replay.reproduce, pagetwin.tools.replay.report\n"
        "found = [n for n in sys.modules if n.startswith(('pagetwin.optimized',"
        " 'matplotlib', 'jinja2'))]\n"
        "assert not found, found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


FAILS = ("check", "reference", "--device", "cpu", "--case-seconds", "0")


@pytest.mark.parametrize("words", [("explain", "slot-mapping"), FAILS])
@pytest.mark.parametrize("before", [None, "0"])
def test_a_command_leaves_the_choice_of_the_interpreter_as_it_was(
    pagetwin, monkeypatch, words, before
) -> None:
    """It stayed set, and kernels that were imported later beside a GPU were interpreted."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if before is not None:
        monkeypatch.setenv("TRITON_INTERPRET", before)
    done = pagetwin(*words)
    assert done.exit_code == (USER_ERROR if words == FAILS else 0), done.output
    assert os.environ.get("TRITON_INTERPRET") == before
