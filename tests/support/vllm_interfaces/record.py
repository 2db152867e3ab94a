"""Record the interface of vLLM's attention backends, release by release, from its wheels.

    python tests/support/vllm_interfaces/record.py             every minor release from 0.25 on
    python tests/support/vllm_interfaces/record.py 0.34.0      that release

Nothing is installed. A wheel is a zip file: the script reads its directory and a few Python files
by HTTP range requests, about 10 MB of 250 to 340 MB, and parses them with `ast`. One JSON file per
release is written beside this script. `tests/integrations/test_vllm_contract.py` compares the
plugin with them.
"""

import ast
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from support.vllm_backends import record_backends, record_defaults  # noqa: E402
from support.wheel_interfaces import (  # noqa: E402
    describe_class,
    parse,
    public_names,
    requirement,
    write_records,
)

OLDEST = (0, 25)
# the first release of which vLLM's own backends are recorded; pages show the newest
OWN_BACKENDS_SINCE = (0, 33)

BACKEND = "vllm.v1.attention.backend"
LATENT = "vllm.model_executor.layers.attention.mla_attention"
CONFIG = "vllm.config"
SPECS = "vllm.v1.kv_cache_interface"
# the classes whose members are recorded, by module; of an enum its members
CLASSES: dict[str, tuple[str, ...]] = {
    BACKEND: (
        "AttentionType",
        "MultipleOf",
        "AttentionBackend",
        "AttentionMetadata",
        "CommonAttentionMetadata",
        "AttentionCGSupport",
        "AttentionMetadataBuilder",
        "AttentionImplBase",
        "AttentionImpl",
        "MLAAttentionImpl",
        "SparseMLAAttentionImpl",
    ),
    LATENT: (
        "QueryLenSupport",
        "MLACommonBackend",
        "MLACommonDecodeMetadata",
        "MLACommonMetadata",
        "MLACommonMetadataBuilder",
        "MLACommonBaseImpl",
        "MLACommonImpl",
    ),
    "vllm.v1.attention.backends.registry": ("AttentionBackendEnum",),
    SPECS: ("AttentionSpec", "KVCacheLayout", "KVQuantMode"),
    "vllm.platforms.cpu": ("CpuPlatform",),
    f"{CONFIG}.compilation": ("CompilationConfig",),
    f"{CONFIG}.model": ("ModelConfig",),
    f"{CONFIG}.parallel": ("ParallelConfig",),
    f"{CONFIG}.scheduler": ("SchedulerConfig",),
    f"{CONFIG}.speculative": ("SpeculativeConfig",),
    f"{CONFIG}.vllm": ("VllmConfig",),
}
# of these classes and modules, names are enough
NAMES_ALONE = ("vllm.config", "vllm.v1.attention.backends.registry")
# further modules whose public names are recorded
MODULES = (
    "vllm.config",
    "vllm.config.cache",
    "vllm.distributed.parallel_state",
    "vllm.envs",
    "vllm.platforms",
    "vllm.utils.torch_utils",
    "vllm.v1.attention.backends.utils",
    "vllm.model_executor.layers.quantization.utils.quant_utils",
)
# the methods whose calls are recorded, and where vLLM calls them
HOOKS = {
    "build_for_cudagraph_capture",
    "build_for_drafting",
    "customize_spec",
    "do_kv_cache_update",
    "forward_mha",
    "forward_mqa",
    "fused_output_quant_supported",
    "get_builder_cls",
    "get_cudagraph_support",
    "get_impl_cls",
    "get_kv_cache_shape",
    "get_kv_cache_stride_order",
    "get_supported_kernel_block_sizes",
    "process_weights_after_loading",
    "supported_kv_cache_layouts",
    "supports_combination",
    "update_block_table",
    "use_cascade_attention",
    "validate_configuration",
}
CALLERS = (
    "vllm/v1/worker/",
    "vllm/v1/attention/selector.py",
    "vllm/v1/attention/backend.py",
    "vllm/v1/spec_decode/",
    "vllm/platforms/",
    "vllm/model_executor/layers/attention/",
)


def newest_of_each_minor(versions: list[str]) -> list[str]:
    """Return the newest patch release of each minor release from the oldest supported one on."""
    newest: dict[tuple[int, ...], tuple[int, ...]] = {}
    for version in versions:
        number = tuple(map(int, version.split(".")))
        if number[:2] >= OLDEST:
            newest[number[:2]] = max(number, newest.get(number[:2], number))
    return [".".join(map(str, version)) for version in sorted(newest.values())]


def calls(tree: ast.Module) -> dict[str, list[list[Any]]]:
    """Return the forms in which hooks are called: positional arguments and keywords.

    A call with a starred argument is left out: its form is not in the source.
    """
    found: dict[str, set[tuple[int, tuple[str, ...]]]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(
            isinstance(argument, ast.Starred) for argument in node.args
        ):
            continue
        named = node.func
        name = named.attr if isinstance(named, ast.Attribute) else None
        if isinstance(named, ast.Name) and named.id == "impl_cls":
            name = "impl_cls"
        of_impl = name == "forward" and ast.unparse(named).endswith(".impl.forward")
        if name in HOOKS or name == "impl_cls" or of_impl:
            keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
            found.setdefault(name, set()).add((len(node.args), keywords))
    return {
        name: sorted([n, list(k)] for n, k in found[name]) for name in sorted(found)
    }


def returned(tree: ast.Module, name: str, method: str) -> str | None:
    """Return the source text of the last value that a method of a class returns."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef) and statement.name == method:
                    last = [
                        x for x in ast.walk(statement) if isinstance(x, ast.Return)
                    ][-1]
                    return last.value and ast.unparse(last.value)
    return None


def cache_dtypes(tree: ast.Module) -> list[str]:
    """Return the values of `--kv-cache-dtype`: those of the literal type `CacheDType`."""
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "CacheDType"
        ):
            assert isinstance(node.value, ast.Subscript)
            return list(ast.literal_eval(node.value.slice))
    raise LookupError("vllm.config.cache has no CacheDType")


# --- one release


def record(version: str, wheel: zipfile.ZipFile) -> dict[str, Any]:
    """Return what is recorded of a release."""
    modules: dict[str, Any] = {}
    for module in sorted({*CLASSES, *MODULES}):
        tree = parse(wheel, module)
        nodes = {x.name: x for x in tree.body if isinstance(x, ast.ClassDef)}
        described = {
            name: describe_class(nodes[name])
            for name in CLASSES.get(module, ())
            if name in nodes
        }
        if module.startswith(NAMES_ALONE):
            for interface in described.values():
                interface["attributes"] = dict.fromkeys(interface["attributes"])
                interface["methods"] = {
                    name: {"kind": method["kind"], "parameters": []}
                    for name, method in interface["methods"].items()
                }
        modules[module] = {"names": public_names(tree), "classes": described}
    flash = parse(wheel, "vllm.v1.attention.backends.flash_attn")
    shape = returned(flash, "FlashAttentionBackend", "get_kv_cache_shape")
    plugins = ast.unparse(parse(wheel, "vllm.plugins"))
    facts = {
        "vllm": version,
        "torch": requirement(wheel, r"^Requires-Dist: torch==(\S+)$"),
        "python": requirement(wheel, r"^Requires-Python: (.+)$"),
        "plugin_group": re.findall(r"DEFAULT_PLUGINS_GROUP = '(.+)'", plugins)[0],
        "flash_attn_cache_shape": shape,
        "cache_dtypes": cache_dtypes(parse(wheel, f"{CONFIG}.cache")),
        "modules": modules,
        "calls": dict(caller_calls(wheel)),
    }
    if tuple(map(int, version.split(".")[:2])) >= OWN_BACKENDS_SINCE:
        facts["defaults"] = record_defaults(wheel)
        facts["backends"] = record_backends(wheel)
    return facts


def caller_calls(wheel: zipfile.ZipFile) -> Iterator[tuple[str, Any]]:
    """Yield the calls of hooks in each file of vLLM that has some."""
    for name in sorted(wheel.namelist()):
        if name.startswith(CALLERS) and name.endswith(".py"):
            found = calls(ast.parse(wheel.read(name)))
            if found:
                yield name, found


if __name__ == "__main__":
    write_records("vllm", HERE, sys.argv[1:], newest_of_each_minor, record)
