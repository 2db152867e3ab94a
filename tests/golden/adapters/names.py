"""Names of vLLM's modules: constants, classes with their members, parameters of functions.

A case names an object. `described` describes our object of that name in every form in which one was
recorded; each case reads the forms of its file.
"""

import importlib
import inspect
import pkgutil
import typing
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import ModuleType, UnionType
from typing import Any

import pagetwin.contract
import pagetwin.engine
import pagetwin.reference
from pagetwin.contract.layouts import KVCacheLayout

from golden.cases import SKIP, adapter, attempt

SHARED: list[ModuleType] = []
for package in (pagetwin.contract, pagetwin.engine):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        # the former name of a module raises an ImportError
        with suppress(ImportError):
            SHARED.append(importlib.import_module(module.name))
RENAMED = {
    "AttentionState": "CommonAttentionState",
    "_compute_slot_mapping_numpy": "compute_slot_mapping",
    "_compute_slot_mapping_python": "compute_slot_mapping",
}
"""vLLM's names whose objects have another name here."""
MODULES = {
    "__all__": (
        "Attention",
        "AttentionBackend",
        "AttentionMetadata",
        "AttentionType",
        "AttentionMetadataBuilder",
        "AttentionState",
        "get_attn_backend",
    ),
    "__all_public__": (
        "CommonAttentionState",
        "CommonMetadataBuilder",
        "MLADims",
        "TAttentionMetadata",
        "_compute_slot_mapping_numpy",
        "_compute_slot_mapping_python",
        "compute_slot_mapping",
        "compute_slot_mapping_start_idx",
        "get_mla_dims",
        "get_num_prefill_decode_query_kv_tokens",
        "get_seq_len_block_table_args",
        "is_all_cross_attn_metadata_set",
        "is_all_encoder_attn_metadata_set",
        "is_block_tables_empty",
    ),
}
"""The names of vllm.attention and of vllm.attention.backends.utils."""


def counterpart(name: str) -> Any:
    """Return our object of vLLM's name; MISSING if there is none."""
    for module in SHARED:
        value = getattr(module, RENAMED.get(name, name), MISSING)
        # what a module imports is not its own
        is_import = isinstance(value, ModuleType) or (
            getattr(value, "__module__", module.__name__) != module.__name__
        )
        if value is not MISSING and not is_import and not name.startswith("__"):
            return value
    return vars(pagetwin.reference).get(RENAMED.get(name, name), MISSING)


def names_here(module: str) -> list[str]:
    """Return the names of one of vLLM's modules that have a counterpart."""
    return [name for name in MODULES[module] if counterpart(name) is not MISSING]


def described(name: str) -> dict[str, Any]:
    """Return our object of a name in every form in which one was recorded."""
    value = counterpart(name)
    if value is MISSING:
        return {"present": False}
    if isinstance(value, type):
        # the text of a class has its module in vLLM
        return {"present": True, "repr": SKIP, **described_class(value)}
    if callable(value):
        return {"present": True, "parameters": parameters(value)}
    return {"present": True, "value": value, "repr": repr(value)}


def described_class(cls: type) -> dict[str, Any]:
    """Return the members of a class, and its attributes that were recorded."""
    own = {name: member for name, member in vars(cls).items() if not is_dunder(name)}
    abstract = sorted(getattr(cls, "__abstractmethods__", ()))
    found: dict[str, Any] = {
        "abstract": abstract,
        "abstract_methods": abstract,
        "members": sorted(own),
        "methods": sorted(
            name for name, member in own.items() if inspect.isroutine(member)
        ),
    }
    if issubclass(cls, Enum):
        found["members"] = {member.name: member.value for member in cls}
    if is_dataclass(cls):
        found["frozen"] = cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
        found["fields"] = fields(cls)
    for name in ("accept_output_buffer", "reorder_batch_threshold"):
        if hasattr(cls, name):
            found[name] = getattr(cls, name)
    if order := getattr(cls, "get_kv_cache_stride_order", None):
        found["stride_order_default"] = attempt(order, KVCacheLayout.NHD)
    return found


def is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def parameters(function: Any) -> list[list[Any]]:
    """Return the parameters of a function, each with its default or "required"."""
    return [
        [
            parameter.name,
            "required" if parameter.default is parameter.empty else parameter.default,
        ]
        for parameter in inspect.signature(function).parameters.values()
    ]


def default_of(field: Any) -> Any:
    return "required" if field.default is MISSING else field.default


def type_text(cls: type, name: str) -> str:
    """Return a field's type as the recorded version wrote it."""
    hint = typing.get_type_hints(cls)[name]
    if isinstance(hint, UnionType):
        inner = [
            argument for argument in typing.get_args(hint) if argument is not type(None)
        ]
        return f"typing.Optional[{inner[0].__name__}]"
    return str(hint)


@adapter("attention_backends_utils_constants")
def utils_constants(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    name = inputs["name"]
    if name in MODULES:
        return {"defined_here": names_here(name)}
    found = described(name)
    if "fields" in found:
        cls = counterpart(name)
        found["fields"] = [
            [field.name, type_text(cls, field.name)] for field in found["fields"]
        ]
    return found


@adapter("attention_package_constants")
def package_constants(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    name = inputs["name"]
    if name in MODULES:
        return {"value": names_here(name)}
    found = described(name)
    if "fields" in found:
        found["fields"] = [field.name for field in found["fields"]]
    return found


FIELDS_OF_0_11 = (
    "query_start_loc",
    "query_start_loc_cpu",
    "seq_lens",
    "seq_lens_cpu",
    "num_computed_tokens_cpu",
    "num_reqs",
    "num_actual_tokens",
    "max_query_len",
    "max_seq_len",
    "block_table_tensor",
    "slot_mapping",
    "causal",
    "logits_indices_padded",
    "num_logits_indices",
    "encoder_seq_lens",
    "dcp_local_seq_lens",
)
"""vLLM's order; ours are given by name only, and newer versions' fields stand among them."""


@adapter("v1_utils_constants")
def v1_constants(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    found = described(inputs["name"])
    if "fields" in found:
        found["fields"] = [
            [field.name, default_of(field), field.compare] for field in found["fields"]
        ]
    if inputs["name"] == "CommonAttentionMetadata":
        by_name = {field[0]: field for field in found["fields"]}
        found["fields"] = [by_name[name] for name in FIELDS_OF_0_11]
    return found


@adapter("v033_constants")
def v033_constants(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    found = described(inputs["name"])
    if "fields" in found:
        found["fields"] = [[field.name, default_of(field)] for field in found["fields"]]
    return found
