"""Both twins have the same files, names, signatures, first lines and steps.

All of it is read from their sources.
"""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from pagetwin.contract import operations
from pagetwin.contract.metadata_classes import PagedAttentionMetadata
from pagetwin.contract.operations import CONCEPTS, Concept
from pagetwin.engine.backend_interface import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
)
from support.source_tree import (
    ROOT,
    TWINS,
    Definition,
    FunctionNode,
    body_of,
    definitions,
    modules,
    resolve,
    steps_of,
    tree_of,
    uses,
)

pytestmark = pytest.mark.quick

# files that operations of the reference are made of; those of the twin are kernels
PARTS_OF_THE_REFERENCE = (
    "attention/masks/",
    "attention/requests/",
    "attention/scores/",
    "attention/heads.py",
    "attention/latent_gather.py",
    "attention/latent_prefill.py",
    "attention/latent_vectors.py",
    "attention/output.py",
    "attention/softmax.py",
    "cache/formats/",
    "cache/latent_formats/",
    "parallel/combine.py",
    "parallel/rank_batch.py",
)
# files of both twins that operations are made of
PARTS = (
    "batch/arrivals.py",
    "batch/fast_prefill_backend.py",
    "cache/prefix_cache.py",
    "parallel/key_splits.py",
    "parallel/prefill_chunks.py",
    "parallel/prompt_ranks.py",
    "parallel/ring_rounds.py",
    "v0/captured_steps.py",
)
FILES = sorted(
    name
    for path in (ROOT / "reference").rglob("[!_]*.py")
    if not (name := path.relative_to(ROOT / "reference").as_posix()).startswith(
        PARTS_OF_THE_REFERENCE
    )
)
# parts of the twin that have no counterpart: kernels, what launches them, and one file per backend
ONLY_PARTS_OF_THE_TWIN = (
    "backends/", "dispatch/", "kernels/", "launch.py", "runtime/", "tuning/", "warm_up/",
    "parallel/combine.py", "parallel/kernels/", "parallel/rank_",
    "parallel/symmetric_ranks.py", "parallel/warm_up_ranks.py",
)  # fmt: skip
OPERATIONS = frozenset(name for concept in CONCEPTS for name in concept.operations)
EACH_OPERATION = [
    (concept, name) for concept in CONCEPTS for name in concept.operations
]
WITH_TWINS = [
    pytest.param(concept, name, id=name)
    for concept, name in EACH_OPERATION
    if not concept.is_single
]

# what an engine needs besides operations
FOR_ENGINES = {
    "AttentionOptions",
    "CommonAttentionMetadata",
    "ExtraKeys",
    "KVCacheSpec",
    "MultiModalFeature",
    "OutOfBlocks",
    "PAD_SLOT_ID",
    "Request",
    "RequestStatus",
    "SchedulerOutput",
}

# what the packages export besides operations
OTHER_EXPORTS = {
    "reference": FOR_ENGINES,
    "optimized": {
        *FOR_ENGINES,
        "SymmetricRanks",
        "WarmUpSpec",
        "WarmedKernel",
        "load_tuning",
        "release_workspace",
        "tune_kernels",
        "tuning_in_use",
        "warm_up",
        "warm_up_ranks",
    },
}


def backends(twin: str) -> tuple[type[AttentionBackend], ...]:
    return import_module(f"pagetwin.{twin}.backends.backend").BACKENDS


# names that only one twin has, and why
ONLY_IN_THE_REFERENCE = {
    "attention/cascade.py": {"TILE": "a size in a body that serves both twins"},
    "backends/backend.py": {
        cls.__name__: "those of the twin have a file per backend"
        for backend in backends("reference")
        for cls in (
            backend,
            backend.get_impl_cls(),
            backend.get_builder_cls(),
            backend.get_metadata_cls(),
        )
    },
}
ONLY_IN_THE_TWIN = {
    "cache/block_table.py": {"padded_rows": "metadata.py pads its rows with it too"},
    "attention/latent.py": {
        "gather_latent_cache": "the reference's is in latent_gather.py",
        "latent_prefill_attention": "the reference's is in latent_prefill.py",
    },
    "attention/merge_states.py": {"TOKENS_PER_PROGRAM": "a tile's size"},
    "cache/slot_mapping.py": {
        "TOKENS_PER_PROGRAM": "a tile's size",
    },
}
# methods that only one backend class has, beyond those of the interface, and why
ONLY_IN_A_BACKEND = {
    ("XFormersAttentionBackend", "validate_head_size"): "vLLM's backend has it too",
    ("XFormersAttentionMetadata", "_part"): "keeps the mask with the decodes",
}


INTERFACE = (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    PagedAttentionMetadata,
)


def source(twin: str, file: str) -> str:
    return (ROOT / twin / file).read_text(encoding="utf-8")


def is_of_the_reference(node: ast.ImportFrom) -> bool:
    return (node.module or "").startswith("reference")


def public_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (
                target.id for target in node.targets if isinstance(target, ast.Name)
            )
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.ImportFrom) and is_of_the_reference(node):
            # one body that serves both twins
            yield from (name.name for name in node.names)


def names_of(twin: str, file: str) -> set[str]:
    tree = ast.parse(source(twin, file))
    return {name for name in public_names(tree) if not name.startswith("_")}


def first_line(docstring: str | None) -> str:
    return (docstring or "").strip().split("\n")[0]


def functions_of(operation: Any) -> dict[str, Any]:
    """Return an operation by its name; of a class, its constructor and public methods."""
    if not inspect.isclass(operation):
        return {operation.__name__: operation}
    return {
        name: method
        for name, method in vars(operation).items()
        if inspect.isfunction(method) and (name == "__init__" or name[0] != "_")
    }


def test_both_twins_have_the_same_files() -> None:
    folder = ROOT / "optimized"
    twin = {path.relative_to(folder).as_posix() for path in folder.rglob("[!_]*.py")}
    only_its_own = {name for name in twin if name.startswith(ONLY_PARTS_OF_THE_TWIN)}
    assert twin - (only_its_own - set(FILES)) == set(FILES)


def test_the_reading_order_names_the_files_of_the_reference() -> None:
    """Each with an idea that needs only those before it; the course has the first ones too."""
    words = import_module("pagetwin.reference").__doc__ or ""
    named = [line.split()[0] for line in words.splitlines() if line[:4] == "    "]
    assert len(named) == 10
    concepts = {concept.module.replace(".", "/") for concept in CONCEPTS}
    assert {*named} <= concepts
    course = (ROOT / "docs" / "course.md").read_text(encoding="utf-8")
    stops = re.findall(r"`reference/(\S+)\.py` \|", course)
    assert [stop for stop in named if stop in stops] == stops


def test_every_concept_is_a_file_of_both_twins() -> None:
    assert {concept.path("reference") for concept in CONCEPTS} == {
        f"reference/{file}" for file in FILES if file not in PARTS
    }
    for concept in CONCEPTS:
        for twin in TWINS:
            module = import_module(f"pagetwin.{twin}.{concept.module}")
            assert module.__file__ is not None
            assert module.__file__.endswith(concept.path(twin))
            assert first_line(module.__doc__) == concept.summary
            for name in concept.operations:
                assert callable(getattr(module, name)), (
                    f"{twin}.{concept.module}.{name}"
                )


def test_both_packages_re_export_every_operation() -> None:
    for twin in TWINS:
        package = import_module(f"pagetwin.{twin}")
        assert set(package.__all__) == {*OPERATIONS, *OTHER_EXPORTS[twin]}
        for concept, name in EACH_OPERATION:
            module = import_module(f"pagetwin.{twin}.{concept.module}")
            assert getattr(package, name) is getattr(module, name)


def test_every_public_function_is_an_operation() -> None:
    """In the file of its concept, in order; a part of it may be in a file of its own."""
    for concept in CONCEPTS:
        module = f"reference.{concept.module}"
        own = [
            node.name
            for node in tree_of(module).body
            if isinstance(node, FunctionNode)
            or (isinstance(node, ast.ClassDef) and node.name in concept.operations)
        ]
        own = [name for name in own if name[0] != "_"]
        own += _operations_in_parts(concept)
        assert sorted(own) == sorted(concept.operations)
        kept = [name for name in concept.operations if name in own]
        assert kept == list(concept.operations)


def _operations_in_parts(concept: Concept) -> list[str]:
    """Return the operations of a concept that are defined in a part of the reference."""
    module = f"reference.{concept.module}"
    found = [(name, resolve(module, name)) for name in concept.operations]
    return [
        name
        for name, place in found
        if place is not None
        and place.module.partition(".")[2].replace(".", "/") + ".py"
        in (*PARTS, *PARTS_OF_THE_REFERENCE)
    ]


def test_the_optimized_twin_imports_the_reference_only_to_re_export_it() -> None:
    """From the file of the same name: one body that serves both twins is the reference's."""
    for name in modules():
        if not name.startswith("optimized"):
            continue
        for node in ast.walk(tree_of(name)):
            if not isinstance(node, ast.ImportFrom):
                continue
            if not is_of_the_reference(node):
                continue
            assert node.module == name.replace("optimized.", "reference."), name
            exported = {*import_module(f"pagetwin.{name}").__dict__.get("__all__", ())}
            for alias in node.names:
                assert alias.asname == alias.name or alias.name in exported, name


@pytest.mark.parametrize("file", FILES)
def test_both_twins_have_the_same_public_names(file: str) -> None:
    reference, twin = names_of("reference", file), names_of("optimized", file)
    assert reference - twin == set(ONLY_IN_THE_REFERENCE.get(file, {}))
    assert twin - reference == set(ONLY_IN_THE_TWIN.get(file, {}))


def test_help_of_an_operator_names_the_docstring_with_its_arguments() -> None:
    twins = [import_module(f"pagetwin.{name}") for name in ("reference", "optimized")]
    named = {
        name: found[1]
        for name in twins[1].__all__
        if (
            found := re.search(
                r"help\(pagetwin\.reference\.(\w+)\)",
                getattr(twins[1], name).__doc__ or "",
            )
        )
    }
    assert {"paged_attention", "reshape_and_cache", "merge_attn_states"} <= set(named)
    for name, target in named.items():
        assert target == name and "Args:" in getattr(twins[0], target).__doc__


@pytest.mark.parametrize(("concept", "operation"), WITH_TWINS)
def test_both_twins_have_the_same_signature(concept: Concept, operation: str) -> None:
    ours, theirs = (
        getattr(import_module(f"pagetwin.{twin}.{concept.module}"), operation)
        for twin in TWINS
    )
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert first_line(ours.__doc__) == first_line(theirs.__doc__)
    assert list(functions_of(ours)) == list(functions_of(theirs))
    pairs = zip(functions_of(ours).values(), functions_of(theirs).values(), strict=True)
    for one, other in pairs:
        assert inspect.signature(one) == inspect.signature(other)
        assert first_line(one.__doc__) == first_line(other.__doc__)


@pytest.mark.parametrize("twin", TWINS)
def test_every_parameter_of_an_operation_is_annotated(twin: str) -> None:
    package = import_module(f"pagetwin.{twin}")
    for _, operation in EACH_OPERATION:
        for function in functions_of(getattr(package, operation)).values():
            parameters = set(inspect.signature(function).parameters) - {"self"}
            assert set(inspect.get_annotations(function)) == {*parameters, "return"}


def public_methods(concept: Concept, operation: str) -> list[str | None]:
    """Return the public methods of a class; of a function, None alone."""
    found = definitions(f"reference.{concept.module}").get(operation)
    if not isinstance(found, ast.ClassDef):
        return [None]
    return [
        node.name
        for node in found.body
        if isinstance(node, FunctionNode) and node.name[0] != "_"
    ]


# operations whose steps differ until their files are rewritten, and why
DIFFERENT_STEPS = {
    "cascade_attention": "its two kernels have the steps of paged attention too"
}


@pytest.mark.parametrize(("concept", "operation"), WITH_TWINS)
def test_both_twins_take_the_same_steps(concept: Concept, operation: str) -> None:
    """In the same words and order; the documentation cuts both files at these lines."""
    if operation in DIFFERENT_STEPS:
        pytest.xfail(DIFFERENT_STEPS[operation])
    for method in public_methods(concept, operation):
        ours, theirs = steps_of_both(concept, operation, method)
        assert ours == theirs, method or operation


def test_an_excused_operation_still_differs() -> None:
    for concept, operation in EACH_OPERATION:
        if operation in DIFFERENT_STEPS:
            ours, theirs = steps_of_both(concept, operation)
            assert ours != theirs, f"{operation}: remove it from DIFFERENT_STEPS"


def steps_of_both(
    concept: Concept, operation: str, method: str | None = None
) -> list[list[str]]:
    """Return the steps of an operation in both twins.

    If one twin has none of its own, it borrows those of the operations in its file that it calls.
    """
    places = [resolve(f"{twin}.{concept.module}", operation) for twin in TWINS]
    assert None not in places
    found = [steps_of(place, OPERATIONS, method) for place in places if place]
    if not all(found) and any(found):
        others = OPERATIONS - set(concept.operations)
        found = [steps_of(place, others, method) for place in places if place]
    return found


@pytest.mark.parametrize("method", ["build", "forward"])
def test_all_backends_take_the_same_steps(method: str) -> None:
    steps = [
        steps_of(Definition(module, name), OPERATIONS, method)
        for backend in (*backends("reference"), *backends("optimized"))
        for module in [backend.__module__.removeprefix("pagetwin.")]
        for name, node in definitions(module).items()
        if name.endswith("Builder" if method == "build" else "Impl")
        and isinstance(node, ast.ClassDef)
    ]
    assert steps[0] and all(own_steps == steps[0] for own_steps in steps)


def test_no_public_function_has_the_same_body_in_both_twins() -> None:
    """One body that serves both twins exists once, in the reference.

    A body that calls a function which differs is not the same.
    """
    same = []
    for concept in CONCEPTS:
        if concept.is_single:
            continue
        ours, theirs = (
            dict(named_functions(f"{twin}.{concept.module}")) for twin in TWINS
        )
        for name in ours.keys() & theirs.keys():
            calls = [
                {
                    used
                    for _, used in uses(f"{twin}.{concept.module}", node)
                    if used.module.startswith(twin)
                }
                for twin, node in zip(TWINS, (ours[name], theirs[name]), strict=True)
            ]
            if body_of(ours[name]) == body_of(theirs[name]) and not any(calls):
                same.append(f"{concept.module}.{name}")
    assert not same


def named_functions(module: str) -> Iterator[tuple[str, FunctionNode]]:
    """Return the public functions and public methods of a module."""
    for node in tree_of(module).body:
        if isinstance(node, FunctionNode) and node.name[0] != "_":
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, FunctionNode) and statement.name[0] != "_":
                    yield f"{node.name}.{statement.name}", statement


def methods(cls: type) -> dict[str, Any]:
    """Return a class's own methods; what is inherited is the same by nature.

    Python 3.14 adds a function that computes annotations.
    """
    found = {}
    for name, value in vars(cls).items():
        if name == "__annotate_func__":
            continue
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if inspect.isfunction(value) and value.__module__ == cls.__module__:
            found[name] = value
    return found


@pytest.mark.parametrize(
    "backend", backends("optimized"), ids=lambda backend: backend.name
)
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
        names = {name for name in methods(theirs) if not name.startswith("__")}
        (interface,) = (base for base in INTERFACE if issubclass(theirs, base))
        assert set(methods(ours)) <= names
        for name in names - extra:
            method = getattr(ours if name in methods(ours) else interface, name)
            one = inspect.signature(method).parameters
            other = inspect.signature(getattr(theirs, name)).parameters
            assert list(one.values()) == list(other.values()), name
            lines = [
                first_line(documented.__doc__)
                for documented in (method, getattr(theirs, name))
            ]
            if name[0] != "_" and "head_sizes" not in name:
                assert lines[1].startswith(lines[0].rstrip(".")), name


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


def test_the_reference_needs_neither_triton_nor_xformers_nor_the_optimized_twin() -> (
    None
):
    """In a fresh process in which the first two cannot be imported, and the twin is not."""
    names = [f"pagetwin.reference.{concept.module}" for concept in CONCEPTS]
    names += ["pagetwin.contract.operations", "pagetwin.engine.selector"]
    program = "\n".join(
        [
            "import sys",
            "sys.modules['triton'] = sys.modules['xformers'] = None",
            *(f"import {name}" for name in names),
            "from pagetwin.contract.operations import load_implementation",
            "print(load_implementation('reference').blocks_needed(9, 4))",
            "print([name for name in sys.modules if 'pagetwin.optimized' in name])",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["3", "[]", ""]


def test_an_implementation_is_loaded_by_its_dotted_name_too() -> None:
    loaded = operations.load_implementation("pagetwin.reference")
    assert loaded.blocks_needed(9, 4) == 3
    with pytest.raises(AttributeError, match="'sing' is not one of"):
        _ = loaded.sing
    with pytest.raises(ModuleNotFoundError):
        operations.load_implementation("no_such_package")
    with pytest.raises(KeyError, match="expected one of block_table"):
        operations.concept("no such concept")


def test_no_file_is_named_after_nothing() -> None:
    for package in ("reference", "optimized", "shared", "tests"):
        for path in (ROOT / package).rglob("*.py"):
            assert path.stem.strip("_") not in {"utils", "helpers", "common", "misc"}
