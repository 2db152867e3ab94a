"""A stand-in for vLLM, generated from a recorded interface.

It has vLLM's module tree, classes, signatures, enums and dataclass fields, and no behaviour: a
constructor keeps its arguments, and any other method raises. So the plugin's own classes can be
derived from it and run on the CPU, for every recorded version.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from support.generated_classes import make_class, make_module

FOLDER = Path(__file__).with_name("vllm_interfaces")
VERSIONS = sorted(
    (path.stem for path in FOLDER.glob("*.json")),
    key=lambda version: tuple(map(int, version.split("."))),
)
PLUGIN = "pagetwin.integrations.vllm"
BASES = "vllm.v1.attention.backend"


@cache
def recorded(version: str) -> dict[str, Any]:
    """Return what was recorded of a version."""
    facts: dict[str, Any] = json.loads((FOLDER / f"{version}.json").read_text())
    return facts


@dataclasses.dataclass(eq=False)
class FakeGroup:
    """vLLM's group of decode context parallelism, as far as the plugin reads it.

    Args:
        device_group: the process group. Optional. If None, nothing can be exchanged.
        world_size, rank_in_group: the ranks, and this one.
        interleave_size: consecutive positions that one rank stores.
        use_ubatching: whether vLLM divides a step into microbatches.
    """

    device_group: Any
    world_size: int
    rank_in_group: int = 0
    interleave_size: int = 1
    use_ubatching: bool = False


@contextmanager
def fake_vllm(
    version: str,
    use_mla: bool = False,
    group: FakeGroup | None = None,
    use_sparse: bool = False,
) -> Iterator[ModuleType]:
    """Put a stand-in for a version of vLLM into `sys.modules`, and the plugin anew beside it.

    Args:
        version: one of `VERSIONS`.
        use_mla: whether the model that vLLM builds has latent attention.
        group: Optional. The ranks that share the keys. If None, there is one.
        use_sparse: whether it has an indexer too.

    Returns:
        The module `vllm`. Afterwards all modules are as before.
    """
    before = {name: sys.modules[name] for name in list(sys.modules) if _is_ours(name)}
    for name in before:
        del sys.modules[name]
    try:
        yield _install(recorded(version), use_mla, group, use_sparse)
    finally:
        for name in [module for module in sys.modules if _is_ours(module)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_ours(name: str) -> bool:
    return name.split(".")[0] == "vllm" or name.startswith(PLUGIN)


def _install(
    facts: dict[str, Any], use_mla: bool, group: FakeGroup | None, use_sparse: bool
) -> ModuleType:
    """Make the modules, and fill in the few functions that the plugin calls."""
    classes: dict[str, type] = {}
    # other modules derive from the classes of this one
    for name in sorted(facts["modules"], key=lambda module: module != BASES):
        described = facts["modules"][name]
        module = make_module(name)
        for member in described["names"]:
            if member.startswith("__"):
                continue  # a module's __getattr__ must be a function
            setattr(module, member, f"{name}.{member}")
        for class_name, members in described["classes"].items():
            classes[class_name] = make_class(class_name, members, classes, name)
            setattr(module, class_name, classes[class_name])
    top = sys.modules["vllm"]
    top.__version__ = facts["vllm"]
    config, envs = sys.modules["vllm.config"], sys.modules["vllm.envs"]
    chosen = SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=use_mla,
            hf_text_config=SimpleNamespace(
                **{"index_topk": 2048} if use_sparse else {}
            ),
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=48, max_num_seqs=4),
    )
    config.get_current_vllm_config_or_none = lambda: chosen
    if group is not None:
        chosen.parallel_config = SimpleNamespace(
            cp_kv_cache_interleave_size=group.interleave_size,
            use_ubatching=group.use_ubatching,
        )
        # as the constructor of vLLM's class does
        base: Any = classes["AttentionImplBase"]
        base.dcp_world_size, base.dcp_rank = group.world_size, group.rank_in_group
        state = sys.modules["vllm.distributed.parallel_state"]
        state.get_dcp_group = lambda: group
    envs.VLLM_BATCH_INVARIANT = False
    on_gpu = SimpleNamespace(is_cpu=lambda: False)
    make_module("vllm.platforms").current_platform = on_gpu  # type: ignore[attr-defined]
    _fill_registry(sys.modules["vllm.v1.attention.backends.registry"])
    _fill_cache_names(facts["cache_dtypes"])
    utils = sys.modules["vllm.v1.attention.backends.utils"]
    if hasattr(utils, "get_kv_cache_layout"):
        utils.get_kv_cache_layout = lambda: "NHD"
    return top


def _fill_cache_names(names: list[str]) -> None:
    """Give the settings of caches their functions, which add a name and know it."""
    settings: Any = sys.modules["vllm.config.cache"]
    settings.KV_CACHE_DTYPES, settings.handlers = list(names), {}
    if not hasattr(settings, "register_kv_cache_dtype"):
        return

    def register_kv_cache_dtype(name: str) -> Any:
        def add(handler: Any) -> Any:
            assert name not in settings.KV_CACHE_DTYPES, "vLLM logs a warning"
            settings.KV_CACHE_DTYPES.append(name)
            settings.handlers[name] = handler()
            return handler

        return add

    settings.register_kv_cache_dtype = register_kv_cache_dtype
    settings.is_known_kv_cache_dtype = lambda name: name in settings.KV_CACHE_DTYPES
    specs: Any = sys.modules["vllm.v1.kv_cache_interface"]
    specs.get_kv_quant_mode = lambda name: specs.KVQuantMode[name.upper()]
    types: Any = sys.modules["vllm.utils.torch_utils"]
    types.STR_DTYPE_TO_TORCH_DTYPE = {
        name: torch.int8 if name.startswith("int8") else torch.uint8 for name in names
    }


def _fill_registry(registry: Any) -> None:
    """Give the registry its functions. Names that it takes of others become members."""
    names = registry.AttentionBackendEnum
    takes_names = hasattr(names, "register")
    registry.registered = {}

    def register_backend(backend: Any, path: str) -> None:
        if isinstance(backend, str):
            assert takes_names, "this release takes members alone"
            if backend in names.__members__:
                raise ValueError(f"Backend {backend} already exists")
            member = object.__new__(names)
            member._name_, member._value_ = backend, path
            names._member_map_[backend] = names._value2member_map_[path] = member
            names._member_names_.append(backend)
            backend = member
        registry.registered[backend] = path

    def get_path(member: Any) -> str:
        if member not in registry.registered:
            raise ValueError(f"Backend {member.name} must be registered before use")
        return str(registry.registered[member])

    def get_class(member: Any) -> Any:
        module, _, name = get_path(member).rpartition(".")
        return getattr(sys.modules[module], name)

    registry.register_backend = register_backend
    names.get_path, names.get_class = get_path, get_class
