"""Record the interface of SGLang's attention backends, release by release, from its wheels.

    python tests/support/sglang_interfaces/record.py             every release from 0.5.20 on
    python tests/support/sglang_interfaces/record.py 0.5.24      that release
    python tests/support/sglang_interfaces/record.py x.whl       the release of a wheel on this disk

Nothing is installed: the script parses Python files of a wheel with `ast`. One JSON file per
release is written beside it. `tests/integrations/test_sglang_contract.py` compares the plugin with
them.
"""

import ast
import enum
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from support.wheel_interfaces import (  # noqa: E402
    describe_class,
    parse,
    public_names,
    requirement,
    write_records,
)

OLDEST = (0, 5, 20)
SRT = "sglang.srt"
MODES = f"{SRT}.model_executor.forward_batch_info"
RUNNER = f"{SRT}.model_executor.model_runner"
# the classes whose members are recorded, by module
CLASSES: dict[str, tuple[str, ...]] = {
    f"{SRT}.layers.attention.base_attn_backend": ("AttentionBackend",),
    f"{SRT}.layers.radix_attention": ("AttentionType", "RadixAttention"),
    f"{SRT}.mem_cache.memory_pool": (
        "KVWriteLoc",
        "ReqToTokenPool",
        "KVCache",
        "MHATokenToKVPool",
    ),
    f"{SRT}.mem_cache.base_swa_memory_pool": ("BaseSWAKVPool",),
    f"{SRT}.mem_cache.swa_memory_pool": ("SWAKVPool",),
    MODES: ("ForwardMode", "ForwardBatch"),
    f"{SRT}.speculative.spec_info": ("SpecInput",),
    f"{SRT}.speculative.eagle_info": ("EagleVerifyInput",),
    f"{SRT}.configs.model_config": ("ModelConfig",),
    RUNNER: ("ModelRunner",),
}
# of these classes names are enough
NAMES_ALONE = (RUNNER, f"{SRT}.configs")
# further modules whose public names are recorded
MODULES = (
    "sglang",
    f"{SRT}.arg_groups.choices",
    f"{SRT}.layers.attention.attention_registry",
    f"{SRT}.plugins",
    f"{SRT}.runtime_context",
)
# the methods whose calls are recorded, and where SGLang calls them
HOOKS = {
    "forward_decode",
    "forward_extend",
    "get_cuda_graph_seq_len_fill_value",
    "init_cuda_graph_state",
    "init_forward_metadata",
    "init_forward_metadata_in_graph",
    "init_forward_metadata_out_graph",
    "set_kv_buffer",
}
CALLERS = (
    "sglang/srt/model_executor/",
    "sglang/srt/layers/attention/base_attn_backend.py",
    "sglang/srt/layers/attention/hybrid_attn_backend.py",
    "sglang/srt/layers/attention/triton_backend.py",
    "sglang/srt/mem_cache/swa_memory_pool.py",
)
SETTINGS = re.compile(r"\bget_(exec|parallel|spec)\(\)\.(\w+(?:\.\w+)?)")


def own_fields(node: ast.ClassDef) -> list[str]:
    """Return the attributes that methods of a class assign to `self`."""
    return sorted(
        {
            x.attr
            for x in ast.walk(node)
            if isinstance(x, ast.Attribute)
            and isinstance(x.ctx, ast.Store)
            and isinstance(x.value, ast.Name)
            and x.value.id == "self"
        }
    )


def truths(node: ast.ClassDef) -> dict[str, list[str]]:
    """Return for each method of an enumeration the members for which it is true.

    Its class body is executed alone; a method that needs more than the class is left out.
    """
    space: dict[str, Any] = {"IntEnum": enum.IntEnum, "auto": enum.auto}
    exec(ast.unparse(node), space)
    made: Any = space[node.name]
    found = {}
    for name, method in vars(made).items():
        if not name.startswith("is_"):
            continue
        try:
            found[name] = [x.name for x in made if method(x)]
        except NameError:
            continue
    return found


def calls(tree: ast.Module) -> dict[str, list[list[Any]]]:
    """Return the forms in which hooks are called: positional arguments and keywords.

    A call with a starred argument is recorded without it.
    """
    found: dict[str, set[tuple[int, tuple[str, ...]]]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        of_backend = name == "forward" and "attn_backend" in ast.unparse(node.func)
        if name in HOOKS or of_backend:
            plain = [x for x in node.args if not isinstance(x, ast.Starred)]
            keywords = tuple(x.arg for x in node.keywords if x.arg)
            found.setdefault(name, set()).add((len(plain), keywords))
    return {
        name: sorted([n, list(k)] for n, k in found[name]) for name in sorted(found)
    }


def record(version: str, wheel: zipfile.ZipFile) -> dict[str, Any]:
    """Return what is recorded of a release."""
    modules: dict[str, Any] = {}
    for module in sorted({*CLASSES, *MODULES}):
        tree = parse(wheel, module)
        nodes = {x.name: x for x in tree.body if isinstance(x, ast.ClassDef)}
        described = {}
        for name in CLASSES.get(module, ()):
            interface = describe_class(nodes[name])
            if module.startswith(NAMES_ALONE):
                interface["methods"], interface["attributes"] = {}, {}
            interface["fields"] = own_fields(nodes[name])
            if name == "ForwardMode":
                interface["truths"] = truths(nodes[name])
            described[name] = interface
        modules[module] = {"names": public_names(tree), "classes": described}
    plugins = ast.unparse(parse(wheel, f"{SRT}.plugins"))
    settings: dict[str, set[str]] = {"exec": set(), "parallel": set(), "spec": set()}
    found_calls = {}
    for path in sorted(wheel.namelist()):
        if not path.startswith("sglang/srt/") or not path.endswith(".py"):
            continue
        text = wheel.read(path).decode()
        for group, name in SETTINGS.findall(text):
            settings[group].add(name)
        if path.startswith(CALLERS):
            made = calls(ast.parse(text))
            if made:
                found_calls[path] = made
    return {
        "sglang": version,
        "torch": requirement(wheel, r"^Requires-Dist: torch==(\S+)$"),
        "kernels": requirement(wheel, r"^Requires-Dist: sglang-kernel==(\S+)$"),
        "python": requirement(wheel, r"^Requires-Python: (.+)$"),
        "plugin_group": re.findall(r"GENERAL_PLUGINS_GROUP = '(.+)'", plugins)[0],
        "modules": modules,
        "settings": {group: sorted(names) for group, names in settings.items()},
        "calls": found_calls,
    }


def choose(versions: list[str]) -> list[str]:
    """Return the releases from the oldest supported one on, in order."""
    numbers = sorted(tuple(map(int, version.split("."))) for version in versions)
    return [".".join(map(str, number)) for number in numbers if number >= OLDEST]


if __name__ == "__main__":
    write_records("sglang", HERE, sys.argv[1:], choose, record)
