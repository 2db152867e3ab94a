"""Which operations exist, and how does one get them from an implementation by name?"""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Concept:
    """One file of each twin: its name, the question it answers, its public operations."""

    name: str
    question: str
    operations: tuple[str, ...]


CONCEPTS = (
    Concept(
        "block_table",
        "Which blocks of the cache does each request own?",
        ("blocks_needed", "make_block_table", "append_blocks"),
    ),
    Concept(
        "slot_mapping",
        "Where does each new token's key and value go?",
        (
            "compute_slot_mapping_start_idx",
            "compute_slot_mapping",
            "compute_slot_mapping_batch",
            "compute_slot_mapping_device",
        ),
    ),
    Concept(
        "kv_cache",
        "What is the cache made of, and how is it cut into blocks?",
        (
            "get_kv_cache_shape",
            "allocate_kv_cache",
            "reshape_kv_cache",
            "split_kv_cache",
        ),
    ),
    Concept(
        "cache_ops",
        "How do keys and values get into the cache, out of it, and from block to block?",
        ("reshape_and_cache", "gather_cache", "copy_blocks", "swap_blocks"),
    ),
    Concept(
        "batch_split",
        "Which requests of the batch decode, and which prefill?",
        ("reorder_batch_to_split_decodes_and_prefills", "split_decodes_and_prefills"),
    ),
    Concept(
        "metadata",
        "What does attention need to know about one step?",
        ("build_common_attn_metadata",),
    ),
    Concept(
        "paged_attention",
        "What does each new token see of its sequence?",
        ("paged_attention",),
    ),
    Concept(
        "backend",
        "How does an engine run all of this as one object?",
        (),
    ),
)


def concept(name: str) -> Concept:
    """Return the concept of that name.

    Raises:
        KeyError: there is none; the message lists what there is.
    """
    for candidate in CONCEPTS:
        if candidate.name == name:
            return candidate
    names = ", ".join(each.name for each in CONCEPTS)
    raise KeyError(f"concept = {name!r}: expected one of {names}")


class Implementation:
    """Every public operation of one twin, as an attribute: `twin.reshape_and_cache(...)`."""

    def __init__(self, name: str, modules: dict[str, ModuleType]) -> None:
        self.name = name
        self.modules = modules

    def __getattr__(self, operation: str) -> Any:
        for each in CONCEPTS:
            if operation in each.operations:
                return getattr(self.modules[each.name], operation)
        raise AttributeError(f"{operation!r} is not one of pagetwin's operations")

    def __repr__(self) -> str:
        return f"Implementation({self.name!r})"


def load_implementation(name: str) -> Implementation:
    """Return an implementation by name, importing nothing but that one.

    Args:
        name: "reference", "optimized", or the dotted name of a package with the same files.

    Raises:
        ModuleNotFoundError: there is no such package, or it lacks one of the files.
    """
    package = f"pagetwin.{name}" if name in ("reference", "optimized") else name
    modules = {
        each.name: importlib.import_module(f"{package}.{each.name}")
        for each in CONCEPTS
    }
    return Implementation(name, modules)
