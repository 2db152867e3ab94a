"""Do both twins tell the same story?

What is fixed about the two packages is read from their sources here: names, signatures, the
question that each file answers, its steps, and who imports whom.
"""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pagetwin.contract import operations
from pagetwin.contract.operations import CONCEPTS
from pagetwin.engine.backend_interface import AttentionBackend

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path.relative_to(ROOT / "reference").as_posix()
    for path in (ROOT / "reference").rglob("*.py")
    if path.name[0] != "_"
)
# folders of the twin that have no counterpart: kernels, and what launches them
ONLY_FOLDERS_OF_THE_TWIN = ("kernels/", "launch/")

# names that only one twin has, and why
ONLY_IN_THE_REFERENCE = {
    "backends/backend.py": {
        "ReferenceAttentionMetadata": "a backend is named after what runs it",
        "ReferenceAttentionMetadataBuilder": "a backend is named after what runs it",
        "ReferenceAttentionImpl": "a backend is named after what runs it",
        "ReferenceAttentionBackend": "a backend is named after what runs it",
    },
}
ONLY_IN_THE_TWIN = {
    "backends/backend.py": {
        f"{library}Attention{part}": "a backend is named after what runs it"
        for library in ("Triton", "XFormers")
        for part in ("Metadata", "MetadataBuilder", "Impl", "Backend")
    },
    "cache/block_table.py": {"padded_rows": "metadata.py pads its rows with it too"},
    "cache/cache_ops.py": {
        "as_bits": "moves bytes, whatever the element type",
        "AS_INTEGERS": "the integer of each width",
        "TOKENS_PER_PROGRAM": "a tile's size",
        "MAX_ELEMENTS_PER_PROGRAM": "a tile's size",
    },
    "attention/latent.py": {
        "TOKENS_PER_PROGRAM": "a tile's size",
        "ELEMENTS_PER_PROGRAM": "a tile's size",
    },
    "attention/merge_states.py": {"TOKENS_PER_PROGRAM": "a tile's size"},
    "cache/slot_mapping.py": {
        "find_request": "a token's request, by bisection; three kernels need it",
        "TOKENS_PER_PROGRAM": "a tile's size",
    },
}
# methods that only one backend class has, beyond those of the interface, and why
ONLY_IN_A_BACKEND = {
    ("XFormersAttentionBackend", "validate_head_size"): "vLLM's backend has it too",
    ("XFormersAttentionImpl", "__init__"): "chooses the decodes' operator once",
    ("XFormersAttentionMetadata", "_part"): "keeps the mask with the decodes",
}


def source(twin: str, file: str) -> str:
    return (ROOT / twin / file).read_text(encoding="utf-8")


def public_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (each.id for each in node.targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def names_of(twin: str, file: str) -> set[str]:
    tree = ast.parse(source(twin, file))
    return {name for name in public_names(tree) if not name.startswith("_")}


def first_line(docstring: str | None) -> str:
    return (docstring or "").strip().split("\n")[0]


def told(twin: str, file: str) -> str:
    """Return a file, and behind it the private files beside it that it imports, and so on."""
    texts: dict[str, str] = {}
    waiting = [file]
    while waiting:
        name = waiting.pop(0)
        if name not in texts:
            texts[name] = source(twin, name)
            waiting += private_imports(twin, name)
    return "\n".join(texts.values())


def private_imports(twin: str, file: str) -> Iterator[str]:
    """Return the files that a file imports and that are not concepts, kernels among them."""
    inside = ".".join([twin, *Path(file).parts[:-1]])
    concepts = {concept.path(twin) for concept in CONCEPTS}
    for name in imported(ast.parse(source(twin, file)), inside):
        parts = name.split(".")[1:]
        for end in (len(parts), len(parts) - 1):
            path = "/".join(parts[:end]) + ".py"
            if parts[:1] == [twin] and (ROOT / path).is_file() and path not in concepts:
                yield path.removeprefix(f"{twin}/")


def steps(text: str) -> list[str]:
    """Return the `# step:` comments in file order, later repeats dropped."""
    found = [
        line.split("# step:")[1].strip()
        for line in text.splitlines()
        if line.strip().startswith("# step:")
    ]
    return list(dict.fromkeys(found))


def functions_of(operation: Any) -> dict[str, Any]:
    """Return an operation by its name; of a class, its constructor and public methods."""
    if not inspect.isclass(operation):
        return {operation.__name__: operation}
    return {
        name: method
        for name, method in vars(operation).items()
        if inspect.isfunction(method) and (name == "__init__" or name[0] != "_")
    }


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Return what a file of `pagetwin.<package>` imports, as absolute names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if not node.level:
                yield node.module or ""
                continue
            base = f"pagetwin.{package}".split(".")
            base = base[: len(base) - node.level + 1]
            for alias in node.names:
                yield ".".join([*base, *filter(None, [node.module]), alias.name])


def test_both_twins_have_the_same_files() -> None:
    folder = ROOT / "optimized"
    twin = {path.relative_to(folder).as_posix() for path in folder.rglob("[!_]*.py")}
    assert {
        name for name in twin if not name.startswith(ONLY_FOLDERS_OF_THE_TWIN)
    } == set(FILES)


def test_every_concept_is_a_file_of_both_twins() -> None:
    assert {concept.path("reference") for concept in CONCEPTS} == {
        f"reference/{file}" for file in FILES
    }
    for concept in CONCEPTS:
        for twin in ("reference", "optimized"):
            module = import_module(f"pagetwin.{twin}.{concept.module}")
            assert first_line(module.__doc__) == concept.summary
            for name in concept.operations:
                assert callable(getattr(module, name)), (
                    f"{twin}.{concept.module}.{name}"
                )


def test_every_public_function_is_an_operation() -> None:
    for concept in CONCEPTS:
        tree = ast.parse((ROOT / concept.path("reference")).read_text(encoding="utf-8"))
        defined = [
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
            or (isinstance(node, ast.ClassDef) and node.name in concept.operations)
        ]
        assert tuple(defined) == concept.operations


@pytest.mark.parametrize("file", FILES)
def test_both_twins_have_the_same_public_names(file: str) -> None:
    reference, twin = names_of("reference", file), names_of("optimized", file)
    assert reference - twin == set(ONLY_IN_THE_REFERENCE.get(file, {}))
    assert twin - reference == set(ONLY_IN_THE_TWIN.get(file, {}))


@pytest.mark.parametrize("file", FILES)
def test_both_twins_answer_the_same_question(file: str) -> None:
    lines = [
        first_line(ast.get_docstring(ast.parse(source(twin, file))))
        for twin in ("reference", "optimized")
    ]
    assert lines[0] == lines[1]
    assert lines[0].endswith("?")


@pytest.mark.parametrize(
    ("concept", "operation"),
    [(each.module, name) for each in CONCEPTS for name in each.operations],
)
def test_both_twins_have_the_same_signature(concept: str, operation: str) -> None:
    ours, theirs = (
        getattr(import_module(f"pagetwin.{twin}.{concept}"), operation)
        for twin in ("reference", "optimized")
    )
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert first_line(ours.__doc__) == first_line(theirs.__doc__)
    assert list(functions_of(ours)) == list(functions_of(theirs))
    pairs = zip(functions_of(ours).values(), functions_of(theirs).values(), strict=True)
    for one, other in pairs:
        assert inspect.signature(one) == inspect.signature(other)
        assert first_line(one.__doc__) == first_line(other.__doc__)
        parameters = set(inspect.signature(one).parameters) - {"self"}
        assert set(inspect.get_annotations(one)) == {*parameters, "return"}


@pytest.mark.parametrize("file", FILES)
def test_both_twins_take_the_same_steps(file: str) -> None:
    """In the same words and order; the documentation cuts both files at these lines."""
    assert steps(told("reference", file)) == steps(told("optimized", file))


def methods(cls: type) -> dict[str, Any]:
    """Return a class's own methods; what is inherited is the same by nature."""
    found = {}
    for name, value in vars(cls).items():
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if inspect.isfunction(value) and value.__module__ == cls.__module__:
            found[name] = value
    return found


def backends(twin: str) -> tuple[type[AttentionBackend], ...]:
    return import_module(f"pagetwin.{twin}.backends.backend").BACKENDS


@pytest.mark.parametrize("backend", backends("optimized"), ids=lambda each: each.name)
def test_every_backend_has_the_methods_of_the_reference(
    backend: type[AttentionBackend],
) -> None:
    (reference,) = backends("reference")
    pairs = [
        (reference, backend),
        (reference.get_impl_cls(), backend.get_impl_cls()),
        (reference.get_builder_cls(), backend.get_builder_cls()),
        (reference.get_metadata_cls(), backend.get_metadata_cls()),
    ]
    for ours, theirs in pairs:
        extra = {name for cls, name in ONLY_IN_A_BACKEND if cls == theirs.__name__}
        generated = {"__init__", "__repr__", "__eq__", "__setattr__", "__delattr__"}
        names = {name for name in methods(theirs) if name not in generated - extra}
        names -= {"__hash__", "__replace__"}
        assert names - extra == set(methods(ours))
        for name, method in methods(ours).items():
            one = inspect.signature(method).parameters
            other = inspect.signature(methods(theirs)[name]).parameters
            assert list(one.values()) == list(other.values()), name
            lines = [
                first_line(each.__doc__) for each in (method, methods(theirs)[name])
            ]
            if "head_sizes" not in name:
                assert lines[1].startswith(lines[0].rstrip(".")), name


def packages_of_shared() -> list[str]:
    return sorted(path.parent.name for path in (ROOT / "shared").glob("*/__init__.py"))


def sources() -> Iterator[tuple[str, Path]]:
    """Return each package of pagetwin with its files."""
    for package in ("reference", "optimized"):
        yield from ((package, path) for path in (ROOT / package).rglob("*.py"))
    for package in packages_of_shared():
        folder = ROOT / "shared" / package
        yield from ((package, path) for path in folder.rglob("*.py"))


def test_imports_run_from_the_twins_to_shared() -> None:
    twins = ("pagetwin.reference", "pagetwin.optimized", "triton", "xformers")
    forbidden = {
        **dict.fromkeys(packages_of_shared(), twins),
        "reference": ("pagetwin.optimized", "triton", "xformers"),
        "optimized": ("pagetwin.reference",),
    }
    for package, path in sources():
        parts = path.relative_to(ROOT).parts
        inside = ".".join(parts[parts.index(package) : -1])
        for name in imported(ast.parse(path.read_text(encoding="utf-8")), inside):
            for each in forbidden[package]:
                assert not f"{name}.".startswith(f"{each}."), f"{path}: {name}"


def test_all_packages_import_each_other_relatively() -> None:
    """So that a copy of the folders works under another name."""
    for _, path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").split(".")[0] != "pagetwin", path


def test_the_old_package_says_what_to_import() -> None:
    for old, new in (
        ("pagetwin.shared.conformance", "pagetwin.conformance"),
        (
            "pagetwin.shared.integrations.transformers",
            "pagetwin.integrations.transformers",
        ),
        ("pagetwin.shared.layer", "pagetwin.engine.layer"),
    ):
        with pytest.raises(ImportError, match=rf"{new} \(was {old}\)"):
            import_module(old)


def test_the_reference_needs_neither_triton_nor_xformers() -> None:
    """In a fresh process in which neither can be imported."""
    modules = [f"pagetwin.reference.{each.module}" for each in CONCEPTS]
    modules += ["pagetwin.contract.operations", "pagetwin.engine.selector"]
    program = "\n".join(
        [
            "import sys",
            "sys.modules['triton'] = sys.modules['xformers'] = None",
            *(f"import {module}" for module in modules),
            "from pagetwin.contract.operations import load_implementation",
            "print(load_implementation('reference').blocks_needed(9, 4))",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3"


def test_loading_one_twin_does_not_import_the_other() -> None:
    for twin, other in (("reference", "optimized"), ("optimized", "reference")):
        program = (
            "import sys; from pagetwin.contract.operations import load_implementation;"
            f" load_implementation({twin!r});"
            f" print([m for m in sys.modules if m.startswith('pagetwin.{other}')])"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "[]"


def test_an_implementation_is_loaded_by_its_dotted_name_too() -> None:
    loaded = operations.load_implementation("pagetwin.reference")
    assert loaded.blocks_needed(9, 4) == 3
    with pytest.raises(AttributeError, match="'sing' is not one of"):
        _ = loaded.sing
    with pytest.raises(ModuleNotFoundError):
        operations.load_implementation("no_such_package")
    with pytest.raises(KeyError, match="expected one of block_table"):
        operations.concept("no such concept")


def test_the_steps_are_read_with_their_repeats_dropped() -> None:
    text = "x  # step: no\n# step: a\n  # step: b\n# step: a\n"
    assert steps(text) == ["a", "b"]


def test_no_file_is_named_after_nothing() -> None:
    for package in ("reference", "optimized", "shared", "tests"):
        for path in (ROOT / package).rglob("*.py"):
            assert path.stem.strip("_") not in {"utils", "helpers", "common", "misc"}
