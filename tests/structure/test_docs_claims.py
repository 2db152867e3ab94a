"""What pages and docstrings say about the code: counts, lists of files, and figures from tests."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.contract.layouts import BLOCK, LAYER, KVCacheLayout
from pagetwin.optimized.kernels.fp8 import has_fp8_encoding, has_native_fp8
from pagetwin.tools.puzzles.tasks import PUZZLES
from support.source_tree import docstrings_of, imports, modules, tree_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight"]
NUMBERS += ["nine", "ten", "eleven", "twelve", "thirteen"]
FILE = re.compile(r"(?<![\w/.*<}-])(?:[\w-]+/)*[\w-]+\.(?:py|md|toml)\b")
# the file of a user, of a puzzle's folder, or of vLLM
FOREIGN = re.compile(r"my_\w+\.py|\d\d_\w+\.py|summary\.md|v1/.*|\w+_?solution\.py")


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """Return what is below a heading, up to the next one of its level."""
    level = heading.split()[0]
    return text.split(f"\n{heading}", 1)[1].split(f"\n{level} ", 1)[0]


def block(text: str) -> str:
    """Return the first Python block."""
    return re.search(r"^```python\n(.*?)^```$", text, re.M | re.S).group(1)  # type: ignore[union-attr]


def course_files() -> list[str]:
    return re.findall(r"^\| \d+ \| `(.+?)`", page("course.md"), re.M)


def module_of(path: str) -> str:
    return next(name for name, file in modules().items() if file == ROOT / path)


def steps(path: str) -> list[str]:
    return re.findall(r"# step: (.+)", (ROOT / path).read_text(encoding="utf-8"))


def tensors_of_a_step() -> list[str]:
    """Return the tensors that the first block of `one_step` makes."""
    names: dict[str, Any] = {}
    exec(block(page("ideas/one_step.md")), names)
    return [name for name, it in names.items() if isinstance(it, torch.Tensor)]


def own_words() -> int:
    words = section(page("glossary.md"), "## Words of this project")
    return len(re.findall(r"^\*\*", words, re.M))


@pytest.mark.parametrize(
    ("name", "words", "count"),
    [
        ("ideas/one_step.md", "{} tensors describe", lambda: len(tensors_of_a_step())),
        ("ideas/one_step.md", "## The {} tensors", lambda: len(tensors_of_a_step())),
        ("course.md", "become {} tensors", lambda: len(tensors_of_a_step())),
        ("concepts/metadata.md", "{} tensors that", lambda: len(tensors_of_a_step())),
        ("course.md", "{} files, about", lambda: len(course_files())),
        ("course.md", "the {} files explain", lambda: len(course_files())),
        ("course.md", "same {} steps in", lambda: len(steps(course_files()[6]))),
        ("course.md", "The {} `# step:` lines", lambda: len(steps(course_files()[7]))),
        (
            "concepts/paged_attention.md",
            "The {} steps are",
            lambda: len(steps(course_files()[6])),
        ),
        ("puzzles.md", "puzzles are {} functions", lambda: len(PUZZLES)),
        ("../README.md", "{} small puzzles", lambda: len(PUZZLES)),
        ("glossary.md", "These {} words are", own_words),
    ],
)
def test_a_count_in_words_is_that_of_what_is_counted(
    name: str, words: str, count: Any
) -> None:
    text = " ".join(page(name).split())
    pattern = re.escape(words).replace(r"\{\}", r"(\w+)")
    found = re.search(pattern, text, re.I)
    assert found, f"{name} does not say {words!r}"
    assert found[1].lower() == NUMBERS[count()]


def test_the_picture_of_a_step_shows_its_tensors_and_says_what_is_not_passed() -> None:
    drawn = (DOCS / "hooks/figures/one_step.py").read_text(encoding="utf-8")
    rows = re.findall(r'^        \(\s*"(\w+)",\s*"([^"]*)"', drawn, re.M)
    assert {name for name, _ in rows} >= {*tensors_of_a_step()} - {"block_table"}
    assert dict(rows)["positions"].startswith("not passed")


def test_the_first_seven_files_of_the_course_have_an_example_per_function() -> None:
    without = []
    for path in course_files():
        nodes = [
            node
            for node in tree_of(module_of(path)).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
            and not node.name.startswith("_")
        ]
        examples = ["Example:" in (ast.get_docstring(node) or "") for node in nodes]
        if not all(examples):
            without.append(path)
    assert without == course_files()[7:]


@pytest.mark.parametrize("stop", range(1, 9))
def test_a_stop_of_the_course_names_what_to_read_and_it_exists(stop: int) -> None:
    path = course_files()[stop - 1]
    text = section(page("course.md"), f"## Stop {stop}:")
    text = text.split("??? tip")[0]
    defined = {
        node.name
        for node in ast.walk(tree_of(module_of(path)))
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    named = re.findall(r"(?<![\w/])`([A-Za-z_]\w*(?:\.\w+)?)`", text)
    functions = {name for name in named if name.rpartition(".")[2] in defined}
    assert functions, f"stop {stop} names no function of {path}"
    for file in re.findall(r"`([\w/]+\.py)`", text):
        assert (ROOT / path).parent.joinpath(file).is_file(), file


@pytest.mark.parametrize("stop", [7, 8])
def test_a_stop_names_the_files_beside_it_that_its_file_imports(stop: int) -> None:
    path = course_files()[stop - 1]
    text = section(page("course.md"), f"## Stop {stop}:").split("??? tip")[0]
    package = module_of(path).rpartition(".")[0]
    missing = []
    for name in imports(module_of(path)):
        if name.startswith(f"{package}."):
            file = modules()[name].relative_to((ROOT / path).parent)
            if f"`{file}`" not in text and f"`{file.parts[0]}/`" not in text:
                missing.append(str(file))
    assert not missing


def table_rows(base: str) -> dict[str, str]:
    """Return the first cells of a table of design.md, and what the row says."""
    table = page("design.md").split(f"| file under `{base}/` |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", table, re.M)
    return dict(rows)


@pytest.mark.parametrize(
    "base",
    [f"optimized/{name}" for name in ("runtime", "dispatch", "warm_up", "kernels")],
)
def test_the_tables_of_the_design_name_every_file_and_no_other(base: str) -> None:
    rows, folder = table_rows(base), ROOT / base
    named = {name for cell in rows for name in re.findall(r"`(\w+\.py)`", cell)}
    # a folder whose row names no file has one that describes them all
    for cell, words in rows.items():
        for inner in re.findall(r"`(\w[\w/]*)/`", cell):
            files = {path.name for path in (folder / inner).glob("*.py")}
            listed = set(re.findall(r"`(\w+\.py)`", words))
            if inner.startswith("sm90"):
                assert listed == files - {"__init__.py"}, inner
            assert listed <= files, inner
    assert named == {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    folders = {
        str(path.parent.relative_to(folder)) for path in folder.rglob("*/*.py")
    } - {"."}
    assert folders == {
        inner for cell in rows for inner in re.findall(r"`(\w[\w/]*)/`", cell)
    }


def test_the_layout_names_every_folder_of_the_source_and_no_other() -> None:
    text = section(page("design.md"), "## Layout").split("```")[1]
    named: list[str] = []
    stack: list[tuple[int, str]] = []
    for spaces, name in re.findall(r"^( *)(\w+)/ ", text, re.M):
        stack = [parent for parent in stack if parent[0] < len(spaces)]
        stack.append((len(spaces), name))
        named.append("/".join(folder for _, folder in stack))
    assert all((ROOT / name).is_dir() for name in named), named
    for top in ("reference", "shared"):
        for path in (ROOT / top).glob("*/__init__.py"):
            assert str(path.parent.relative_to(ROOT)) in named


def test_the_table_of_layouts_follows_from_the_order_of_their_axes() -> None:
    rows = re.findall(
        r"^\| ([LBHNC]{5}) \|[^|]*\|(.*)\|(.*)\|(.*)\|$",
        page("concepts/kv_cache.md"),
        re.M,
    )
    assert {row[0] for row in rows} == {layout.name for layout in KVCacheLayout}
    for name, *cells in rows:
        order = KVCacheLayout[name].stride_order
        block_of_a_layer = ""
        if LAYER in order[:2] and BLOCK in order[:2]:
            in_order = order[2:] == tuple(sorted(order[2:]))
            block_of_a_layer = "yes, in vLLM's logical order" if in_order else "yes"
        assert [cell.strip() for cell in cells] == [
            "yes" if order[0] == LAYER else "",
            block_of_a_layer,
            "yes" if order[0] == BLOCK else "",
        ], name


def test_the_page_of_kernels_allows_the_spills_that_the_compile_test_does() -> None:
    test = (ROOT / "tests/kernels/test_compile.py").read_text(encoding="utf-8")
    limits = re.findall(r'line\["stack"\] <= (\d+)', test)
    limits += re.findall(r'>= 90 > line\["registers"\]', test) and ["90 registers"]
    words = section(page("howto/kernel.md"), "## 5. Compile test")
    assert len(limits) == 3
    assert all(re.search(rf"\b{limit}\b", words) for limit in limits), limits


@pytest.mark.parametrize("function", [has_fp8_encoding, has_native_fp8])
def test_the_page_of_cache_operations_names_the_chips_that_convert_fp8(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(function.__wrapped__.__globals__, "INTERPRETED", False)
    for chip in ((8, 0), (8, 6), (8, 9), (9, 0)):
        properties = SimpleNamespace(major=chip[0], minor=chip[1])
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _, it=properties: it
        )
        if function.__wrapped__(torch.device("cuda")):
            break
    words = section(
        page("concepts/cache_ops.md"), "## What the optimized implementation"
    )
    verb = "writ" if function is has_fp8_encoding else "read"
    assert re.search(rf"{chip[0]}\.{chip[1]}\D[^.,]*{verb}", words)


def described() -> list[tuple[str, Path, str]]:
    """Return every docstring with its module and file."""
    return [
        (module, path, words)
        for module, path in modules().items()
        for _, words in docstrings_of(module)
    ]


def test_every_file_that_a_docstring_names_exists() -> None:
    """It is beside the module, or in a folder above it, or has its path from a top folder."""
    missing = []
    for module, path, words in described():
        roots = [
            *path.parents,
            *(ROOT / top for top in ("reference", "optimized", "shared")),
        ]
        for name in FILE.findall(words):
            if not FOREIGN.fullmatch(name) and not any(
                (root / name).is_file() for root in roots
            ):
                missing.append(f"{module}: {name}")
    assert not missing, "\n".join(missing)


@pytest.fixture
def hooks() -> Iterator[Any]:
    """Return a function that imports a module of the site's hooks."""
    sys.path.insert(0, str(DOCS / "hooks"))
    yield importlib.import_module
    sys.path.pop(0)


def words_of(name: str) -> str:
    """Return the text of a page in one line."""
    return " ".join(page(name).split())


def test_the_summary_of_the_extended_suite_counts_the_rows_of_its_record(
    hooks: Any,
) -> None:
    """It counted rows against our own kernels as baselines of others, and 1.0003 as slower."""
    aims: dict[str, Any] = {}
    for run in hooks("page_data").bench_runs("bench_extended"):
        if run["machine"]["device"] == "NVIDIA H200":
            for workload in run["workloads"]:
                if workload.get("aim"):
                    aims.setdefault(workload["name"], workload["aim"])
    own = [aim for aim in aims.values() if aim["baseline"].startswith("ours")]
    ratios = [
        aim["ratio"] for aim in aims.values() if not aim["baseline"].startswith("ours")
    ]
    ahead = sum(ratio < 0.999 for ratio in ratios)
    slower = sum(ratio > 1.001 for ratio in ratios)
    level = len(ratios) - ahead - slower
    met = sum(aim["met"] for aim in aims.values())
    shown = words_of("benchmark.md")
    assert f"{met} of {len(aims)} aims met. Of {len(ratios)} with another" in shown
    assert f"ahead on {ahead}, by up to" in shown
    assert f"level within 0.1 % on {level}; slower on {slower}, by up to" in shown
    assert f"{NUMBERS[len(own)].capitalize()} are compared with our own time" in shown
    assert f"slower on {NUMBERS[slower]} of the extended suite" in shown
    assert f"by up to {100 * (max(ratios) - 1):.1f} %" in shown


def test_full_batches_reach_the_share_of_a_plain_read_that_the_record_has(
    hooks: Any,
) -> None:
    run = hooks("page_data").bench_runs("bench")[0]
    shares = {
        workload["name"]: workload["floor_us"]
        / workload["results"]["ours"]["median_us"]
        for workload in run["workloads"]
    }
    shown = words_of("kernel_notes.md")
    for name in ("decode-64x4k-fp8", "decode-64x4k-swa"):
        assert re.search(rf"`{name}` reaches {100 * shares[name]:.0f} %", shown) or (
            f"`{name}` {100 * shares[name]:.0f} %" in shown
        )
    for name in ("decode-64x4k", "decode-64x4k-mha", "decode-256-ragged"):
        assert 0.90 <= shares[name] <= 0.98


def test_pages_on_engines_say_what_their_tables_show(hooks: Any) -> None:
    """Three ratios are below 1, of which one was shown as 1.00."""
    table = hooks("serving_table")
    ratios = re.findall(r"\| (\d\.\d{3}) \|$", table.serving_table(), re.M)
    below = sum(float(ratio) < 1 for ratio in ratios)
    assert below == 3
    assert "`CUSTOM` is below vLLM's backend in three rows." in words_of(
        "integrations/vllm_runs.md"
    )
    rows = [
        row.split(" | ")
        for row in table.recorded_table().splitlines()
        if "llama-8" in row
    ]
    loss = [
        f"{100 * (1 - float(row[-1].rstrip(' |'))):.1f}"
        for row in rows
        if row[1] == "default"
    ]
    assert f"{loss[0]}, {loss[1]} and {loss[2]} % less at" in words_of("recorder.md")
