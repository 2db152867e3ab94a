"""Caches, layouts and the backends that own them."""

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from pagetwin.contract.layouts import KVCacheLayout

from golden.adapters.layer import VLLM_BACKENDS
from golden.deviations import deviation

ALLOCATE, RESHAPE, INIT = "allocate_kv_cache", "reshape_kv_cache", "init_kv_cache"


# ---- tensors and groups


def listed(inputs: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the layers that the tensors name, and those that the groups name."""
    config = inputs["kv_cache_config"]
    tensors = [
        name for tensor in config["kv_cache_tensors"] for name in tensor["shared_by"]
    ]
    groups = [
        name for group in config["kv_cache_groups"] for name in group["layer_names"]
    ]
    return tensors, groups


def names_the_same(inputs: dict[str, Any]) -> bool:
    """Return whether tensors and groups name the same layers, which both sides require."""
    tensors, groups = listed(inputs)
    return set(tensors) == set(groups)


def names_one_twice(inputs: dict[str, Any]) -> bool:
    return any(len(set(names)) < len(names) for names in listed(inputs))


def page_bytes(spec: dict[str, Any]) -> int:
    halves = 1 if spec.get("type") == "mla" else 2
    size = getattr(torch, spec["dtype"].removeprefix("torch.")).itemsize
    sizes = spec["block_size"] * spec["num_kv_heads"] * spec["head_size"]
    return int(halves * sizes * size)


def pages(inputs: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield the bytes of each layer's tensor, and the bytes of its pages."""
    config = inputs["kv_cache_config"]
    sizes = {
        name: tensor["size"]
        for tensor in config["kv_cache_tensors"]
        for name in tensor["shared_by"]
    }
    for group in config["kv_cache_groups"]:
        for name in group["layer_names"]:
            yield sizes[name], page_bytes(group["kv_cache_spec"])


def is_shaped(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM reshapes every tensor."""
    if not names_the_same(inputs) or inputs.get("runner_kv_caches_len_before", 0):
        return False
    has_orders = all(
        isinstance(backend.get("stride_order"), list)
        for backend in inputs["attn_backends"].values()
    )
    return has_orders and all(size % page == 0 for size, page in pages(inputs))


def has_enough_pages(inputs: dict[str, Any]) -> bool:
    blocks = inputs["kv_cache_config"]["num_blocks"]
    return all(size >= blocks * page for size, page in pages(inputs))


@deviation(ALLOCATE, fields=["raises"], right="a ValueError: a layer has one cache")
def a_layer_is_named_twice(inputs: dict[str, Any]) -> bool:
    """vLLM lets two tensors name a layer and keeps the last, so that the other is not used."""
    return names_the_same(inputs) and names_one_twice(inputs)


@deviation(
    RESHAPE, INIT, fields=["raises"], right="a ValueError: a layer has one cache"
)
def a_shaped_layer_is_named_twice(inputs: dict[str, Any]) -> bool:
    """vLLM lets two tensors name a layer and keeps the last, so that the other is not used."""
    return is_bound(inputs) and names_one_twice(inputs)


@deviation(RESHAPE, INIT, fields=["raises"], right="num_blocks pages at least")
def a_tensor_has_too_few_pages(inputs: dict[str, Any]) -> bool:
    """vLLM does not read num_blocks, so that blocks can be allocated which no tensor has."""
    return is_bound(inputs) and not has_enough_pages(inputs)


@deviation(RESHAPE, fields=["raises"], right="the order of the axes")
def a_backend_has_no_order_of_its_own(inputs: dict[str, Any]) -> bool:
    """vLLM raises NotImplementedError for a backend without a memory order."""
    if not names_the_same(inputs) or names_one_twice(inputs):
        return False
    is_whole = all(size % page == 0 for size, page in pages(inputs))
    backends = inputs["attn_backends"].values()
    lacks = any(
        not isinstance(backend.get("stride_order"), list) for backend in backends
    )
    return lacks and is_whole and has_enough_pages(inputs)


# ---- binding


def layer_number(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdecimal())


def share_a_number(inputs: dict[str, Any]) -> bool:
    numbers = {layer_number(name) for name in inputs["forward_context_layers"]}
    return len(numbers) < len(inputs["forward_context_layers"])


def is_bound(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM binds every cache; a script of `reshape_kv_cache` binds none."""
    if "forward_context_layers" not in inputs:
        return is_shaped(inputs)
    is_cuda = inputs["platform"] == "cuda"
    return is_shaped(inputs) and (is_cuda or not share_a_number(inputs))


def is_created_here(inputs: dict[str, Any]) -> bool:
    """Return whether every layer has one tensor of whole and sufficient pages."""
    if not names_the_same(inputs) or names_one_twice(inputs):
        return False
    is_whole = all(size % page == 0 for size, page in pages(inputs))
    names = listed(inputs)[1]
    is_bound = all(len(layer_number(name)) == 1 for name in names)
    is_bound &= {*names} <= {*inputs["forward_context_layers"]}
    return is_whole and has_enough_pages(inputs) and is_bound


@deviation(INIT, fields=["raises"], right="the caches are returned, without a list")
def the_runner_has_caches_already(inputs: dict[str, Any]) -> bool:
    """vLLM appends to the runner's list, which must be empty."""
    return bool(inputs["runner_kv_caches_len_before"] > 0) and is_created_here(inputs)


@deviation(INIT, fields=["raises"], right="both layers are bound, as in vLLM 0.33")
def two_layers_have_one_number(inputs: dict[str, Any]) -> bool:
    """vLLM accepts two layers of one number on CUDA only, after it has bound some caches."""
    is_run = not inputs["runner_kv_caches_len_before"] and is_created_here(inputs)
    return inputs["platform"] != "cuda" and share_a_number(inputs) and is_run


def ordered_layers(inputs: dict[str, Any]) -> list[str]:
    return sorted(listed(inputs)[1], key=layer_number)


@deviation(
    INIT,
    fields=["runner_kv_caches_layers"],
    right="all caches, in the order of the layers' numbers, as in vLLM 0.33",
    value=ordered_layers,
)
def two_layers_on_cuda_have_one_number(inputs: dict[str, Any]) -> bool:
    """vLLM lists only the first of two layers of one number."""
    is_run = is_shaped(inputs) and is_created_here(inputs)
    return inputs["platform"] == "cuda" and share_a_number(inputs) and is_run


# ---- specs and builders


@deviation("get_kv_cache_spec", fields=["raises"], right="a spec per layer, as in 0.33")
def a_layer_is_not_a_decoders(inputs: dict[str, Any]) -> bool:
    """vLLM rejects a model whose layers are not all a decoder's."""
    layers = [
        layer for layer in inputs["layers"].values() if layer["kind"] == "attention"
    ]
    return any(layer["attn_type"] != "decoder" for layer in layers)


@deviation(
    "init_attn_backend",
    fields=["attn_backends", "builders_in_order", "events"],
    right="each layer keeps its backend; one builder per group and backend, as in 0.33",
)
def a_group_has_several_backends(inputs: dict[str, Any]) -> bool:
    """vLLM gives every layer of a group the backend of the first one."""
    layers = inputs["layers"]
    groups = [group["layer_names"] for group in inputs["kv_cache_groups"]]
    if not all(names and names[0] in layers for names in groups):
        return False  # both raise
    kinds = [{layers.get(name) for name in names} for names in groups]
    return not lacks_a_layer(inputs) and any(
        len(kinds_of_group) > 1 for kinds_of_group in kinds
    )


def lacks_a_layer(inputs: dict[str, Any]) -> bool:
    groups = [group["layer_names"] for group in inputs["kv_cache_groups"]]
    return not all(name in inputs["layers"] for names in groups for name in names)


@deviation("init_attn_backend", fields=["raises"], right="a KeyError for the layer")
def a_later_layer_of_a_group_is_unknown(inputs: dict[str, Any]) -> bool:
    """vLLM looks at the first layer of a group alone."""
    groups = [group["layer_names"] for group in inputs["kv_cache_groups"]]
    is_run = all(names and names[0] in inputs["layers"] for names in groups)
    return is_run and lacks_a_layer(inputs)


# ---- layouts

LAYOUT_NAMES = ("NHD", "HND")
NHD_FIRST = ("FlashAttentionBackend", "FlexAttentionBackend", "TreeAttentionBackend")
"""Backends whose cache has keys and values on its first axis, as here."""
ANY_BLOCK_SIZE = ("FlexAttentionBackend",)
WITH_AN_ORDER = ("FlashAttentionBackend", "FlashInferBackend")
"""Backends with a memory order of five axes of their own."""


def backend_name(inputs: dict[str, Any]) -> str:
    return str(inputs["backend"]).rpartition(".")[2]


def is_heads_first(inputs: dict[str, Any]) -> bool:
    """Return whether the heads are before the slots, and exchanging them changes no number."""
    is_same = inputs["block_size"] == inputs["num_kv_heads"]
    return is_same and backend_name(inputs) == "CPUAttentionBackend"


@deviation("real_backend_kv_layouts", fields=["raises"], right="a ValueError")
def a_block_of_a_backend_has_no_slots(inputs: dict[str, Any]) -> bool:
    """vLLM's backends do not compare the block size with 0."""
    return bool(inputs["block_size"] < 1)


@deviation(
    "real_backend_kv_layouts",
    fields=["shape"],
    right="one logical shape for all backends and any block size",
    value=lambda inputs: [
        2,
        *(
            inputs[name]
            for name in ("num_blocks", "block_size", "num_kv_heads", "head_size")
        ),
    ],
)
def a_backend_has_another_shape(inputs: dict[str, Any]) -> bool:
    """Some of vLLM's backends take only multiples of 16, or have the block on the first axis."""
    name = backend_name(inputs)
    if inputs["block_size"] < 1 or is_heads_first(inputs):
        return False
    is_other = not name.startswith(("Rocm", *NHD_FIRST))
    return is_other or (inputs["block_size"] % 16 != 0 and name not in ANY_BLOCK_SIZE)


@deviation(
    "real_backend_kv_layouts",
    fields=["stride_order"],
    right="the order of the layout",
    value=lambda inputs: (
        [0, 1, 2, 3, 4] if inputs["kv_cache_layout"] == "NHD" else [0, 1, 3, 2, 4]
    ),
)
def a_backend_has_no_order(inputs: dict[str, Any]) -> bool:
    """Some of vLLM's backends have no memory order, others keep a latent without heads."""
    is_layout = inputs["kv_cache_layout"] in LAYOUT_NAMES
    return is_layout and backend_name(inputs) not in WITH_AN_ORDER


@deviation(
    "real_backend_kv_layouts",
    fields=["stride_order.raises"],
    right="the order of the layout, as in 0.33",
)
def a_backends_layout_has_a_later_name(inputs: dict[str, Any]) -> bool:
    """vLLM 0.12 knows two layouts."""
    layout = KVCacheLayout.__members__.get(inputs["kv_cache_layout"])
    is_later = inputs["kv_cache_layout"] not in LAYOUT_NAMES
    return is_later and layout is not None and layout.is_layer_compact


class LayoutRead(NamedTuple):
    """One "get" of the layout.

    Args:
        layout: the answer. None where both sides raise, because the variable has another word.
        is_remembered: whether it is the answer to an earlier "get".
        override, variable: the word that was set, and that of the environment.
    """

    layout: str | None
    is_remembered: bool
    override: str | None
    variable: str | None


def layout_reads(inputs: dict[str, Any], cached: bool) -> list[LayoutRead]:
    """Return every "get", with or without the memory of the first one."""
    override = variable = remembered = None
    found: list[LayoutRead] = []
    for op in inputs["ops"]:
        if op["op"] == "get":
            current = variable or inputs["connector_layout"]
            current = current if override is None else override
            is_remembered = cached and remembered is not None
            if is_remembered:
                current = remembered
            elif override is None and variable and variable not in LAYOUT_NAMES:
                current = None  # an error, which is not remembered
            remembered = current
            found.append(LayoutRead(current, is_remembered, override, variable))
        elif op["op"] == "set":
            override = op.get("cache_layout", op.get("value"))
        elif op["op"] == "env":
            variable = op.get("value")
        elif op["op"] == "cache_clear":
            remembered = None
    return found


def layouts(inputs: dict[str, Any], cached: bool) -> list[str | None]:
    """Return the layout of every "get"."""
    return [read.layout for read in layout_reads(inputs, cached)]


@deviation("kv_cache_layout", fields=["results"], right="every call reads the choice")
def a_layout_is_chosen_after_the_first_call(inputs: dict[str, Any]) -> bool:
    """vLLM remembers its first answer, so that a later choice has no effect."""
    return layouts(inputs, cached=True) != layouts(inputs, cached=False)


@deviation("kv_cache_layout", fields=["results"], right="a ValueError")
def an_unknown_layout_is_set(inputs: dict[str, Any]) -> bool:
    """vLLM returns any word that was set as a layout."""
    words = {
        op.get("cache_layout", op.get("value"))
        for op in inputs["ops"]
        if op["op"] == "set"
    }
    found = {*layouts(inputs, cached=True), *layouts(inputs, cached=False)}
    return bool((words & found) - {*LAYOUT_NAMES, None})


LATER_NAMES = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@deviation("kv_cache_layout", fields=["results"], right="True, as in 0.33")
def a_layout_has_a_later_name(inputs: dict[str, Any]) -> bool:
    """vLLM 0.11 knows two layouts."""
    checks = [op for op in inputs["ops"] if "valid" in op["op"]]
    given = [op.get("cache_layout", op.get("value")) for op in checks]
    return any(layout in LATER_NAMES for layout in given)


@deviation("kv_cache_layout", fields=["results"], right="an empty word chooses nothing")
def the_variable_is_empty(inputs: dict[str, Any]) -> bool:
    """vLLM takes '' for the name of a layout that it does not know."""
    return any(
        read.variable == "" and read.override is None and not read.is_remembered
        for read in layout_reads(inputs, cached=True)
    )


@deviation("v033_kv_cache_layout", fields=["raises"], right="an alias of the layout")
def a_layout_has_its_older_name(inputs: dict[str, Any]) -> bool:
    """vLLM knows the older names only where it reads a configuration."""
    return inputs["what"] == "layout" and inputs["name"] in LAYOUT_NAMES


@deviation("v033_backend_block_sizes", fields=["raises"], right="a ValueError")
def a_block_has_no_slots(inputs: dict[str, Any]) -> bool:
    """vLLM accepts a block of 0 slots as a multiple of every size."""
    size, known = inputs["block_size"], inputs["supported_kernel_block_sizes"]
    return bool(known) and size is not None and size < 1


# ---- choice of a backend

CALLS = ["results", "platform_calls"]


class Asked(NamedTuple):
    """A call that needs a platform.

    Args:
        name: name of a backend that is in force. None leaves the choice to the platform.
        is_remembered: whether vLLM has the answer to an earlier call with the same arguments.
    """

    name: str | None
    is_remembered: bool


def asked(inputs: dict[str, Any]) -> list[Asked]:
    """Return each call that needs a platform. vLLM remembers answers, and not errors."""
    forced = variable = None
    known: set[tuple[Any, ...]] = set()
    found: list[Asked] = []
    for op in inputs["ops"]:
        if op["op"] == "force":
            forced = op["backend"]
        elif op["op"] == "env":
            variable = op["value"]
        elif op["op"] == "cache_clear":
            known = set()
        elif op["op"] == "call" and not op.get("is_attention_free", False):
            arguments = tuple(sorted((k, str(v)) for k, v in op.items()))
            name = variable if forced is None else forced
            found.append(Asked(name, arguments in known))
            if (name is None or name in VLLM_BACKENDS) and names_a_class(inputs):
                known.add(arguments)
    return found


def names_a_class(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM finds the class that its platform names."""
    path = inputs.get("platform_returns")
    if path is None or path.startswith("vllm."):
        return True
    module, _, name = path.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), name)
    except (ImportError, ValueError):
        return False


@deviation("get_attn_backend", fields=CALLS, right="every call reads the choice")
def the_same_arguments_are_asked_again(inputs: dict[str, Any]) -> bool:
    """vLLM remembers its answer for arguments, whatever is chosen later."""
    return any(call.is_remembered for call in asked(inputs))


@deviation("get_attn_backend", fields=CALLS, right="an empty name chooses nothing")
def a_name_is_empty(inputs: dict[str, Any]) -> bool:
    """vLLM takes '' for the name of a backend."""
    calls = asked(inputs)
    return any(call.name == "" and not call.is_remembered for call in calls)


@deviation("get_attn_backend", fields=["results"], right="a name is a class")
def a_platform_names_no_class(inputs: dict[str, Any]) -> bool:
    """vLLM's platform returns the path of a class, which may be empty or lead nowhere."""
    is_asked = any(
        call.name is None or call.name in VLLM_BACKENDS for call in asked(inputs)
    )
    return is_asked and not names_a_class(inputs)
