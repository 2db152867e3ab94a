"""The vLLM plugin against the interface of every recorded version of vLLM; vLLM is not needed."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pagetwin.integrations.vllm.versions import INTERFACES, find_interface
from support.fake_vllm import VERSIONS, fake_vllm, recorded
from support.source_tree import ROOT

pytestmark = pytest.mark.quick

FOLDER = ROOT / "shared" / "integrations" / "vllm"
BACKEND = "vllm.v1.attention.backend"
LATENT = "vllm.model_executor.layers.attention.mla_attention"
# functions that exist in some versions only; they are imported where those versions call them
OPTIONAL_NAMES = {
    ("vllm.v1.attention.backends.utils", "get_kv_cache_layout"),
    ("vllm.config.cache", "is_known_kv_cache_dtype"),
    ("vllm.config.cache", "register_kv_cache_dtype"),
    ("vllm.v1.attention.backend", "SparseMLAAttentionImpl"),
}


KINDS = {
    "paged": ("AttentionBackend", "AttentionMetadataBuilder", "AttentionImpl"),
    "latent": ("MLACommonBackend", "MLACommonMetadataBuilder", "MLACommonImpl"),
    "sparse": ("MLACommonBackend", "AttentionMetadataBuilder", "MLAAttentionImpl"),
}
"""vLLM's classes that ours derive from, by the kind of attention."""


def fake(version: str, kind: str) -> Any:
    """Put a stand-in for a version into place, whose model has that kind of attention."""
    return fake_vllm(version, kind != "paged", use_sparse=kind == "sparse")


def classes_of(version: str, kind: str) -> Iterator[tuple[str, type]]:
    """Yield our classes inside a stand-in, each with the name of vLLM's class that it replaces."""
    from pagetwin.integrations.vllm.plugin import choose_backend

    backend = choose_backend()
    names = list(KINDS[kind])
    if kind == "sparse" and find_interface(version).has_sparse_class:
        names[2] = "SparseMLAAttentionImpl"
    ours = (backend, backend.get_builder_cls(), backend.get_impl_cls())
    for name, mine in zip(names, ours, strict=True):
        assert name in {base.__name__ for base in mine.__mro__}
        yield name, mine


def methods_of_vllm(version: str, name: str) -> dict[str, dict[str, Any]]:
    """Return the methods of one of vLLM's classes and of its bases."""
    described = {
        class_name: members
        for module in (LATENT, BACKEND)
        for class_name, members in recorded(version)["modules"][module][
            "classes"
        ].items()
    }
    found: dict[str, dict[str, Any]] = {}
    for base in described[name]["bases"]:
        if base in described:
            found |= methods_of_vllm(version, base)
    return found | described[name]["methods"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_of_interfaces_says_what_the_wheels_say(version: str) -> None:
    facts, interface = recorded(version), find_interface(version)
    methods = facts["modules"][BACKEND]["classes"]["AttentionBackend"]["methods"]
    builder = facts["modules"][BACKEND]["classes"]["AttentionMetadataBuilder"]
    assert version.startswith(f"{interface.name}.")
    assert interface.torch == facts["torch"]
    assert interface.has_shape_hooks == ("get_kv_cache_shape" in methods)
    assert interface.has_cascade == ("use_cascade_attention" in builder["methods"])
    registry = facts["modules"]["vllm.v1.attention.backends.registry"]["classes"]
    names = registry["AttentionBackendEnum"]["methods"]
    assert interface.takes_names == ("register" in names)
    bases = facts["modules"][BACKEND]["classes"]
    assert interface.has_sparse_class == ("SparseMLAAttentionImpl" in bases)
    says_so = "is_sparse" in bases["AttentionImplBase"]["attributes"]
    assert interface.has_sparse_class != says_so
    shape = facts["flash_attn_cache_shape"]
    if shape is None:
        assert interface.is_packed
    else:
        halves = "(num_blocks, 2, block_size, num_kv_heads, head_size)"
        packed = "(num_blocks, num_kv_heads, block_size, 2 * head_size)"
        assert shape == (packed if interface.is_packed else halves)


def test_every_minor_version_of_the_table_is_recorded_and_in_order() -> None:
    minors = [tuple(map(int, version.split(".")[:2])) for version in VERSIONS]
    assert [interface.minor for interface in INTERFACES] == minors


@pytest.mark.parametrize("version", VERSIONS)
def test_the_entry_point_is_in_the_group_that_vllm_loads(version: str) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    group = recorded(version)["plugin_group"]
    assert f'[project.entry-points."{group}"]' in text
    assert 'pagetwin = "pagetwin.integrations.vllm:register"' in text


@pytest.mark.sample(9)
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("version", VERSIONS)
def test_no_abstract_method_is_left(version: str, kind: str) -> None:
    with fake(version, kind):
        for _, ours in classes_of(version, kind):
            assert not getattr(ours, "__abstractmethods__", frozenset()), ours


@pytest.mark.sample(9)
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("version", VERSIONS)
def test_a_method_of_ours_takes_what_vllms_takes(version: str, kind: str) -> None:
    """Its parameters by position and by name, in the same order, and none of its own without a
    default."""
    with fake(version, kind):
        for name, ours in classes_of(version, kind):
            for method, described in methods_of_vllm(version, name).items():
                if method.startswith("_") and method != "__init__":
                    continue
                mine = inspect.getattr_static(ours, method)
                plain = getattr(mine, "__func__", mine)
                if not inspect.isfunction(plain) or plain.__module__.startswith("vllm"):
                    continue
                parameters = described["parameters"]
                if method == "__init__":
                    # what a subclass of vLLM's own adds has a default
                    parameters = [
                        parameter for parameter in parameters if parameter[2] is None
                    ]
                for args, keywords in _forms(parameters, method):
                    inspect.signature(plain).bind(*args, **keywords)


def _forms(
    parameters: list[list[Any]], method: str
) -> Iterator[tuple[list[int], dict[str, int]]]:
    """Yield the calls by position and by name that parameters allow."""
    plain = [name for name, kind, _ in parameters if kind == "plain"]
    keywords = {name: 0 for name, kind, _ in parameters if kind == "keyword"}
    own = ("self", "cls")
    if method != "__init__":  # the recorded calls say how vLLM constructs
        yield [0] * len(plain), keywords
    yield (
        [0] * (plain[:1] in [[first] for first in own]),
        {**{name: 0 for name in plain if name not in own}, **keywords},
    )


@pytest.mark.sample(9)
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("version", VERSIONS)
def test_our_methods_accept_every_call_that_vllm_makes(version: str, kind: str) -> None:
    """vLLM 0.31 called get_supported_kernel_block_sizes with an argument that had not existed."""
    with fake(version, kind):
        ours = [cls for _, cls in classes_of(version, kind)]
        count = 0
        for caller, hooks in recorded(version)["calls"].items():
            if "sparse" in caller or ("mla" in Path(caller).stem) != (kind != "paged"):
                continue
            for hook, forms in hooks.items():
                name = "__init__" if hook == "impl_cls" else hook
                target = ours[2] if hook == "impl_cls" else _owner(ours, hook)
                if target is None:
                    continue
                method = inspect.getattr_static(target, name)
                plain = getattr(method, "__func__", method)
                is_bound = not isinstance(method, staticmethod)
                for positional, keywords in forms:
                    if hook == "validate_configuration":
                        continue  # vLLM's own, called with the fields of a tuple
                    args = [0] * (positional + is_bound)
                    inspect.signature(plain).bind(*args, **dict.fromkeys(keywords, 0))
                    count += 1
        assert count > 2


def _owner(classes: list[type], hook: str) -> type | None:
    return next((cls for cls in classes if hasattr(cls, hook)), None)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_that_the_plugin_imports_exists(version: str) -> None:
    modules = recorded(version)["modules"]
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.level:
                continue
            if not (node.module or "").startswith("vllm"):
                continue
            for alias in node.names:
                if (node.module, alias.name) not in OPTIONAL_NAMES:
                    assert alias.name in modules[node.module]["names"], (
                        path,
                        alias.name,
                    )


@pytest.mark.parametrize("version", VERSIONS)
def test_the_platform_for_cpus_chooses_a_backend_by_the_replaced_arguments(
    version: str,
) -> None:
    classes = recorded(version)["modules"]["vllm.platforms.cpu"]["classes"]
    method = classes["CpuPlatform"]["methods"]["get_attn_backend_cls"]
    names = [name for name, *_ in method["parameters"]]
    assert method["kind"] == "class"
    assert names[:3] == ["cls", "selected_backend", "attn_selector_config"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_field_that_the_plugin_reads_exists(version: str) -> None:
    modules = recorded(version)["modules"]

    def members(module: str, name: str) -> set[str]:
        described = modules[module]["classes"][name]
        return {*described["attributes"], *described["methods"]}

    fields = {
        name
        for file in ("builder.py", "sparse_builder.py")
        for name in re.findall(
            r"\bcommon\.(\w+)", (FOLDER / file).read_text(encoding="utf-8")
        )
    }
    assert len(fields) > 6
    assert fields <= members(BACKEND, "CommonAttentionMetadata")
    assert {
        "compilation_config",
        "model_config",
        "parallel_config",
        "scheduler_config",
        "speculative_config",
    } <= members("vllm.config.vllm", "VllmConfig")
    compilation = members("vllm.config.compilation", "CompilationConfig")
    assert "static_forward_context" in compilation
    scheduler = members("vllm.config.scheduler", "SchedulerConfig")
    assert {"max_num_seqs", "max_num_batched_tokens"} <= scheduler
    model = members("vllm.config.model", "ModelConfig")
    assert {"max_model_len", "use_mla", "hf_text_config"} <= model
    parallel = members("vllm.config.parallel", "ParallelConfig")
    assert {"cp_kv_cache_interleave_size", "use_ubatching"} <= parallel
    ranks = {"dcp_world_size", "pcp_world_size"}
    assert ranks <= members(BACKEND, "AttentionImplBase")
    drafts = members("vllm.config.speculative", "SpeculativeConfig")
    assert "num_speculative_tokens" in drafts
    decode = members(LATENT, "MLACommonDecodeMetadata")
    assert {"block_table", "seq_lens"} <= decode
    step = members(LATENT, "MLACommonMetadata")
    assert {"query_start_loc", "max_query_len", "max_seq_len", "decode"} <= step


def test_the_page_has_every_version_and_every_environment_variable() -> None:
    page = (ROOT / "docs" / "integrations" / "vllm.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| 0.")]
    told = {
        (minor, row[1], "heads, slots" in row[2], row[3] == "backend |")
        for row in rows
        for minor in row[0].removeprefix("| ").split(", ")
    }
    assert told == {
        (
            interface.name,
            interface.torch,
            interface.is_packed,
            interface.has_shape_hooks,
        )
        for interface in INTERFACES
    }
    for folder in ("optimized", "shared"):
        for path in (ROOT / folder).rglob("*.py"):
            if {"tools", "conformance", "sglang"} & {*path.parts}:
                continue
            text = path.read_text(encoding="utf-8")
            for name in re.findall(r'"(PAGETWIN_[A-Z_]+)"', text):
                assert f"`{name}`" in page, (path, name)


def test_an_unknown_newer_version_gets_the_newest_interface_and_one_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("WARNING"):
        assert find_interface("1.2.0.dev7+gabc") is INTERFACES[-1]
    (said,) = caplog.messages
    newest = INTERFACES[-1].name
    assert "vLLM 1.2.0.dev7+gabc is not known" in said
    assert f"install vllm=={newest}.*" in said
    assert said.count(". ") == 0


def test_an_older_version_is_rejected_with_the_command_that_helps() -> None:
    expected = r"vllm = 0\.24\.0: expected 0\.25 to .*pip install 'vllm>=0\.25'"
    with pytest.raises(RuntimeError, match=expected):
        find_interface("0.24.0")
