"""Names of vLLM's modules: those without a counterpart, and interfaces of classes."""

import inspect
from dataclasses import MISSING, is_dataclass
from typing import Any

from golden.adapters.names import MODULES, counterpart, names_here
from golden.deviations import deviation

UTILS, PACKAGE = "attention_backends_utils_constants", "attention_package_constants"
V1, V033 = "v1_utils_constants", "v033_constants"
FILES = (UTILS, PACKAGE, V1, V033)


def is_missing(name: str) -> bool:
    return name not in MODULES and counterpart(name) is MISSING


@deviation(*FILES, fields=["*"], right="docs/vllm-map.md lists what has a counterpart")
def a_name_without_counterpart_is_asked(inputs: dict[str, Any]) -> bool:
    """vLLM's modules have type variables, loggers, tables, settings of one platform and classes
    of other features."""
    return is_missing(inputs["name"])


@deviation(
    *FILES,
    fields=[
        "abstract",
        "abstract_methods",
        "accept_output_buffer",
        "members",
        "methods",
        "stride_order_default",
    ],
    right="a backend names its classes as attributes, and writes into the given output",
)
def the_interface_of_a_class_is_asked(inputs: dict[str, Any]) -> bool:
    """vLLM's classes leave other methods abstract, have methods of other features, and allocate
    their own output."""
    found = counterpart(inputs["name"])
    is_class = inspect.isclass(found) and not is_dataclass(found)
    return is_class and (
        inspect.isabstract(found) or inputs["name"] == "AttentionState"
    )


@deviation(UTILS, fields=["frozen"], right="True: values do not change")
def the_dataclass_of_a_model_is_asked(inputs: dict[str, Any]) -> bool:
    """vLLM's dataclasses can be modified."""
    found = counterpart(inputs["name"])
    return inspect.isclass(found) and is_dataclass(found)


@deviation(
    UTILS,
    fields=["defined_here"],
    right="no type variable",
    value=lambda _: names_here("__all_public__"),
)
def the_names_of_a_module_are_asked(inputs: dict[str, Any]) -> bool:
    """vLLM's module defines a type variable for its metadata."""
    return inputs["name"] == "__all_public__"


@deviation(PACKAGE, fields=["parameters"], right="the cache's spec and the device")
def the_parameters_of_the_selector_are_asked(inputs: dict[str, Any]) -> bool:
    """vLLM's selector takes what identifies a cache one by one, and finds the request for a backend
    in global state."""
    return inputs["name"] == "get_attn_backend"


@deviation(V033, fields=["fields"], right="exact lengths on the host")
def the_fields_of_a_step_are_asked(inputs: dict[str, Any]) -> bool:
    """vLLM dropped the host's exact lengths, and added fields of features that are not here."""
    return inputs["name"] == "CommonAttentionMetadata"


@deviation(V1, fields=["present"], right="one list of the fields")
def the_fields_of_a_fast_prefill_are_asked(inputs: dict[str, Any]) -> bool:
    """vLLM removed the list in 0.11.1."""
    return inputs["name"] == "KV_SHARING_FAST_PREFILL_METADATA_FIELDS"
