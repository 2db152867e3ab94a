"""The import graph of pagetwin: no cycles, and packages depend on each other in one direction."""

import ast
import re
import sys
from collections import defaultdict

import pytest
from support.compiler_process import json_lines
from support.source_tree import FOLDERS, ROOT, TWINS, cycles, imports, modules, tree_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


pytestmark = pytest.mark.quick

CONTRACT = {"contract", "validation"}
ENGINE = {*CONTRACT, "engine"}
# the packages that each package may import besides itself; docs/design.md draws it
ALLOWED: dict[str, set[str]] = {
    "contract": set(),
    "validation": {"contract"},
    "recorder": CONTRACT,
    "engine": {*CONTRACT, "recorder"},
    "reference": ENGINE,
    "optimized": {*ENGINE, "reference"},
    "conformance": ENGINE,
    "examples": ENGINE,
    "gluon_interpreter": set(),
    "integrations": {*ENGINE, "recorder", "reference"},
    "tools": {
        *ENGINE,
        "conformance",
        "examples",
        "gluon_interpreter",
        "recorder",
        "reference",
    },
}
# imports that are still to be removed, by importing module and imported module
PENDING_IMPORTS: set[tuple[str, str]] = set()
PENDING_CYCLES: list[list[str]] = []
# strings that name a module of a twin: measured code, reached by name since tools may not import it
PENDING_STRINGS: set[tuple[str, str]] = set()
# public classes that still have the name of another one
PENDING_NAMES: set[str] = set()
# folders of a package; each imports its own floor and those before it
FLOORS: dict[str, list[set[str]]] = {
    "optimized": [
        {"runtime"},
        {"kernels"},
        {"dispatch"},
        {"attention", "batch", "cache", "sparse", "v0"},
        {"backends", "tuning", "warm_up"},
        {"parallel"},
    ],
    "conformance": [
        {"base"},
        {"oracles"},
        {"cases"},
        {"checks"},
        {"candidates"},
        {"laws"},
        {"running"},
        {"reports"},
        {"api"},
        {"flashinfer_bench"},
        {"pytest_plugin"},
    ],
}
# files outside of the folders `v0` that name them: they change if the forms of vLLM V0 are removed
NAME_V0 = {
    "reference/__init__.py": "public names",
    "optimized/__init__.py": "public names",
    "shared/contract/operations.py": "list of concepts",
    "shared/contract/graph_classes.py": "former name",
    "shared/contract/sequence_classes.py": "former name",
    "shared/examples/__init__.py": "examples of the concepts",
    "shared/conformance/laws/all_laws.py": "list of laws",
    "tests/structure/test_imports.py": "list of floors, and this list",
    "tests/structure/test_package.py": "former names",
    "tests/structure/test_twins.py": "list of parts",
    "tests/conformance/test_rejected_calls.py": "list of operations",
    "docs/hooks/bugs/stale_state.py": "the state of a bug in them",
}
LIBRARIES = {"triton", "xformers"}
KERNEL_PACKAGES = ("optimized", "tools", "gluon_interpreter")
KERNEL_FOLDERS = ("examples.gluon.", "examples.ladder.")
# makes Triton's interpreter faster, and is imported only if the checked kernels use Triton
USES_LIBRARIES = {"conformance.running.interpreter"}
# more files than a dozen in one folder, and why
LARGE_FOLDERS = {
    "optimized/kernels/portable/options": "one file per option",
    "optimized/kernels/portable": "one file per kernel and per step of a kernel",
    "optimized/kernels/sm90/common": "one file per step of a role, and its host code",
    "optimized/kernels/sm90/latent": "one file per role and step, and their host code",
    "optimized/runtime": "one file per stage of a launch, and what families have in common",
    "shared/integrations/vllm": "one file per class that vLLM loads, and what two of them share",
    "optimized/parallel": "one file per part of a step, and what its ranks share",
    "optimized/batch": "one file per part of a step",
    "reference/batch": "one file per part of a step",
    "shared/conformance/cases": "one file per kind of case",
    "shared/conformance/laws": "one file per subject of laws",
    "shared/contract": "one file per family of classes",
    "shared/engine": "the layer and its backends, and what ranks and devices need",
    "shared/examples": "one file per concept",
    "shared/examples/ladder": "one file per rung",
    "shared/gluon_interpreter": "one file per part of a program",
    "shared/tools": "one file per group of commands, and what they share",
    "shared/tools/bench": "one file per part of a run",
    "shared/tools/bench/libraries": "one file per library, and what they share",
    "shared/tools/puzzles/tasks": "one file per puzzle",
    "shared/tools/replay": "to be grouped",
    "shared/validation": "one file per subject of arguments",
    "shared/validation/options": "one file per option",
}


def test_no_modules_import_each_other() -> None:
    assert [cycle for cycle in cycles() if cycle not in PENDING_CYCLES] == []
    assert all(pending_cycle in cycles() for pending_cycle in PENDING_CYCLES), (
        "shorten PENDING_CYCLES"
    )


def test_packages_import_each_other_in_one_direction() -> None:
    assert set(ALLOWED) == set(FOLDERS)
    against = set()
    for module in modules():
        package = module.split(".")[0]
        for target in imports(module):
            if target.split(".")[0] not in {package, *ALLOWED[package]}:
                against.add((module, target))
    assert against - PENDING_IMPORTS == set()
    assert against >= PENDING_IMPORTS, "shorten PENDING_IMPORTS"


def floor_of(module: str) -> int:
    """Return the floor of a module of a package with floors, counted from below."""
    package, _, inner = module.partition(".")
    floors, folder = FLOORS[package], inner.partition(".")[0]
    return next((at for at, names in enumerate(floors) if folder in names), len(floors))


@pytest.mark.parametrize("package", FLOORS)
def test_a_package_has_floors_that_import_only_those_below(package: str) -> None:
    upward = {
        (module, target)
        for module in modules()
        if module.startswith(f"{package}.")
        for target in imports(module)
        if target.startswith(f"{package}.") and floor_of(target) > floor_of(module)
    }
    assert upward == set()
    names = {path.name for path in FOLDERS[package].iterdir() if path.is_dir()}
    assert names - {"__pycache__"} == set().union(*FLOORS[package])


def test_a_chip_is_named_in_its_own_folder_and_in_the_list_of_families_alone() -> None:
    for path in (ROOT / "optimized").rglob("*.py"):
        name = path.relative_to(ROOT / "optimized").as_posix()
        if not name.startswith("kernels/sm90/") and name != "dispatch/families.py":
            text = path.read_text(encoding="utf-8")
            assert not re.search("sm90|hopper", text, re.IGNORECASE), name


def test_the_forms_of_v0_are_in_their_folders_alone() -> None:
    named = set()
    for top in (*TWINS, "shared", "tests", "docs"):
        for path in (ROOT / top).rglob("*.py"):
            name = path.relative_to(ROOT)
            if "v0" in name.parts or name.name.startswith("v0_"):
                continue
            if re.search(r"\bv0\b(?!\.\d)", path.read_text(encoding="utf-8")):
                named.add(name.as_posix())
    assert named == set(NAME_V0)


@pytest.mark.extended
def test_a_decode_goes_from_floor_to_floor_to_its_launch() -> None:
    """67 functions were entered once, and calls turned back 46 times."""
    (walked,) = json_lines(ROOT / "tests/structure/walked_call.py")
    order = ["", "attention", "dispatch", "kernels", "runtime", "shared"]
    for caller, floor, name in walked:
        assert order.index(caller) <= order.index(floor), name
    assert len(walked) <= 25, walked


@pytest.mark.extended
def test_a_check_goes_from_floor_to_floor_to_its_first_law() -> None:
    """49 modules were entered, and calls turned back 29 times."""
    (walked,) = json_lines(ROOT / "tests/structure/walked_check.py")
    entered, calls = walked
    order = [name for names in FLOORS["conformance"] for name in names]
    order.append("tools")
    for caller, floor, name in calls:
        assert order.index(caller) >= order.index(floor), name
    assert entered[-1][1] == "laws"
    assert len(entered) <= 21, entered


def test_the_allowed_directions_have_no_cycle() -> None:
    reached: set[str] = set()
    while layer := {name for name in ALLOWED if ALLOWED[name] <= reached} - reached:
        reached |= layer
    assert reached == set(ALLOWED)


def test_only_three_packages_use_the_libraries_of_kernels() -> None:
    """Neither triton nor xFormers is imported anywhere else, not even inside a function."""
    for module in modules():
        package = module.split(".")[0]
        if package in KERNEL_PACKAGES or module.startswith(KERNEL_FOLDERS):
            continue
        if module in USES_LIBRARIES:
            continue
        for node in ast.walk(tree_of(module)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not LIBRARIES & {name.split(".")[0] for name in names}, module


def test_packages_import_each_other_relatively() -> None:
    """So that a copy of the folders works under another name."""
    for module in modules():
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").split(".")[0] != "pagetwin", module


def test_no_string_names_a_module_of_a_twin() -> None:
    """What is reached by name is an operation or a backend, never a module inside a twin."""
    named = re.compile(
        rf"pagetwin\.(?:{'|'.join(TWINS)})\.[\w.]+|pagetwin(?:\.\w+)*\._\w+"
    )
    found = {
        (module, text)
        for module in modules()
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for text in [node.value]
        if named.fullmatch(text)
    }
    assert found - PENDING_STRINGS == set()
    assert found >= PENDING_STRINGS, "shorten PENDING_STRINGS"


def test_public_class_names_are_unique() -> None:
    """Except in the twins, which name their classes alike."""
    where: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        package = module.split(".")[0]
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ClassDef) and node.name[0] != "_":
                where[node.name].add("twins" if package in TWINS else module)
    double = {name: places for name, places in where.items() if len(places) > 1}
    assert set(double) - PENDING_NAMES == set(), double
    assert set(double) >= PENDING_NAMES, "shorten PENDING_NAMES"


def test_no_test_module_is_imported_by_another_file() -> None:
    own = {path.stem for path in (ROOT / "tests").glob("*/test_*.py")}
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        # most files name none where an import may be, and are not parsed
        if not re.search(r"^ *(?:from|import) .*\btest_|^ +test_\w+,?$", text, re.M):
            continue
        for node in ast.walk(ast.parse(text)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            assert not own & {name.rpartition(".")[2] for name in names}, path


def test_no_folder_is_a_drawer() -> None:
    for package, folder in FOLDERS.items():
        for path in [folder, *(inner for inner in folder.rglob("*") if inner.is_dir())]:
            count = len([file for file in path.glob("*.py") if file.stem != "__init__"])
            name = path.relative_to(ROOT).as_posix()
            assert count <= 12 or name in LARGE_FOLDERS, f"{name}: {count} modules"
            assert package


def test_no_file_is_longer_than_600_lines() -> None:
    for path in modules().values():
        count = len(path.read_text(encoding="utf-8").splitlines())
        name = path.relative_to(ROOT).as_posix()
        assert count <= 600, f"{name}: {count} lines"


@pytest.mark.parametrize("table", ["packages", "package-dir"])
def test_pyproject_lists_the_packages_on_disk(table: str) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = settings["tool"]["setuptools"][table]
    if table == "packages":
        on_disk = {
            ".".join(["pagetwin", package, *path.relative_to(folder).parent.parts])
            for package, folder in FOLDERS.items()
            for path in folder.rglob("__init__.py")
        }
        assert set(listed) == {*on_disk, "pagetwin", "pagetwin.shared"}
    else:
        assert listed == {
            **{
                f"pagetwin.{package}": folder.relative_to(ROOT).as_posix()
                for package, folder in FOLDERS.items()
            },
            "pagetwin": "shared/package",
            "pagetwin.shared": "shared",
        }


def test_every_package_is_typed_and_found_by_type_checkers() -> None:
    """The outer package had no marker: for mypy an installed `pagetwin` itself had no types."""
    assert (ROOT / "shared/package/py.typed").is_file()
    assert (ROOT / ".typing/pagetwin/py.typed").is_file()
    for package, folder in FOLDERS.items():
        assert (folder / "py.typed").is_file(), folder
        link = ROOT / ".typing" / "pagetwin" / package
        assert link.resolve() == folder.resolve()
