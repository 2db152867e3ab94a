"""A stand-in for SGLang, generated from a recorded interface.

It has SGLang's module tree, classes, signatures, enums and dataclass fields. Of behaviour it has
the predicates of `ForwardMode`, the settings of a process, and the registry of backends.
"""

import enum
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from support.generated_classes import make_class, make_module

FOLDER = Path(__file__).with_name("sglang_interfaces")
VERSIONS = sorted(
    (path.stem for path in FOLDER.glob("*.json")),
    key=lambda version: tuple(map(int, version.split("."))),
)
PLUGIN = "pagetwin.integrations.sglang"
SRT = "sglang.srt"
BASES = f"{SRT}.layers.attention.base_attn_backend"
ATTENTION = f"{SRT}.layers.radix_attention"
MEMORY = f"{SRT}.mem_cache.memory_pool"
WINDOWS = f"{SRT}.mem_cache.swa_memory_pool"
BATCH = f"{SRT}.model_executor.forward_batch_info"
RUNNER = f"{SRT}.model_executor.model_runner"
CONFIG = f"{SRT}.configs.model_config"
SPECULATION = f"{SRT}.speculative.eagle_info"
# bases before the classes that derive from them
ORDER = (BASES, MEMORY, f"{SRT}.mem_cache.base_swa_memory_pool", WINDOWS)


@cache
def recorded(version: str) -> dict[str, Any]:
    """Return what was recorded of a version."""
    facts: dict[str, Any] = json.loads((FOLDER / f"{version}.json").read_text())
    return facts


def members(version: str, module: str, name: str) -> set[str]:
    """Return the names of attributes, fields and methods of one of SGLang's classes."""
    described = recorded(version)["modules"][module]["classes"][name]
    return {*described["attributes"], *described["methods"], *described["fields"]}


@contextmanager
def fake_sglang(version: str, **settings: Any) -> Iterator[ModuleType]:
    """Put a stand-in for a version of SGLang into `sys.modules`, and the plugin anew beside it.

    Args:
        version: one of `VERSIONS`.
        settings: of the process, by their last name, such as `attn_dp_size`. Others are as SGLang
            has them for one GPU and no drafts.

    Returns:
        The module `sglang`. Afterwards all modules are as before.
    """
    before = {name: sys.modules[name] for name in list(sys.modules) if _is_ours(name)}
    for name in before:
        del sys.modules[name]
    try:
        yield _install(recorded(version), settings)
    finally:
        for name in [module for module in sys.modules if _is_ours(module)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_ours(name: str) -> bool:
    return name.split(".")[0] == "sglang" or name.startswith(PLUGIN)


def _install(facts: dict[str, Any], settings: dict[str, Any]) -> ModuleType:
    """Make the modules, and fill in the few functions that the plugin calls."""
    classes: dict[str, type] = {}
    modules = facts["modules"]
    for name in sorted(modules, key=lambda x: ORDER.index(x) if x in ORDER else 9):
        module = make_module(name)
        for member in modules[name]["names"]:
            if not member.startswith("__"):
                setattr(module, member, f"{name}.{member}")
        for class_name, described in modules[name]["classes"].items():
            made = make_class(class_name, described, classes, name)
            if "truths" in described:
                made = _make_modes(described)
            classes[class_name] = made
            setattr(module, class_name, made)
    top = sys.modules["sglang"]
    top.__version__ = facts["sglang"]  # type: ignore[attr-defined]
    _fill_settings(facts["settings"], settings)
    choices: Any = sys.modules[f"{SRT}.arg_groups.choices"]
    for name in (
        "ATTENTION_BACKEND_CHOICES",
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
        "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
    ):
        setattr(choices, name, ["triton"])
    deterministic = "add_deterministic_attention_backend_choices"
    with_radix = "add_radix_supported_deterministic_attention_backend_choices"
    choices.add_attention_backend_choices = choices.ATTENTION_BACKEND_CHOICES.extend
    known = choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    setattr(choices, deterministic, known.extend)
    known = choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND
    setattr(choices, with_radix, known.extend)
    registry: Any = sys.modules[f"{SRT}.layers.attention.attention_registry"]
    registry.ATTENTION_BACKENDS = {}
    registry.register_attention_backend = lambda name: partial(
        registry.ATTENTION_BACKENDS.setdefault, name
    )
    return top


def _make_modes(described: dict[str, Any]) -> Any:
    """Return `ForwardMode` with its predicates."""
    names = list(described["attributes"])
    modes: Any = enum.IntEnum("ForwardMode", names)  # type: ignore[misc]
    for predicate, true_of in described["truths"].items():

        def answer(self: Any, *_: Any, true_of: Any = frozenset(true_of)) -> bool:
            return self.name in true_of

        setattr(modes, predicate, answer)
    return modes


def _fill_settings(known: dict[str, list[str]], settings: dict[str, Any]) -> None:
    """Make the functions `get_exec`, `get_parallel` and `get_spec`."""
    context: Any = sys.modules[f"{SRT}.runtime_context"]
    plain: dict[str, Any] = {
        "attn_dp_size": 1,
        "attn_cp_size": 1,
        "attn_dcp_size": 1,
        "enable_two_batch_overlap": False,
        "enable_deterministic_inference": False,
        "dllm_algorithm": None,
        "speculative_algorithm": None,
        "speculative_eagle_topk": None,
        **settings,
    }
    for group, names in known.items():
        made = SimpleNamespace()
        for name in names:
            inner, _, last = name.rpartition(".")
            if last not in plain:
                continue
            target = made
            if inner:
                target = made.__dict__.setdefault(inner, SimpleNamespace())
            setattr(target, last, plain[last])
        setattr(context, f"get_{group}", lambda made=made: made)
