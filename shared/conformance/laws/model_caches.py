"""Laws of the caches of a model: allocation, views in the layout of each backend, and binding."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.layouts import KV_CACHE_LAYOUT_VARIABLE, KVCacheLayout
from ...contract.specs import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from ..candidates.setting import Setting
from ..checks.cache_memory import (
    DTYPES,
    PAGE,
    SPEC,
    expect_view,
    is_packed_in,
    numbered_bytes,
    some_bytes,
)
from ..checks.canaries import memory_of
from ..checks.expect import Disagreement, expect_rejection, expect_same
from .cache_views import SPECS
from .law import law


class SlotsFirst:
    """The part of a backend that a cache needs: [2, blocks, slots, heads, elements]."""

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return the axes as the kernel indexes them."""
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def get_kv_cache_stride_order(cls, layout: KVCacheLayout) -> tuple[int, ...]:
        """Return the axes, the outermost in memory first."""
        return (0, 1, 3, 2, 4) if layout is KVCacheLayout.HND else (0, 1, 2, 3, 4)


class BlocksFirst(SlotsFirst):
    """A backend that stores a block's keys and values together.

    Its orders are cyclic permutations of the axes, so an order and its inverse differ.
    """

    @classmethod
    def get_kv_cache_stride_order(cls, layout: KVCacheLayout) -> tuple[int, ...]:
        """Return the axes, the outermost in memory first."""
        return (1, 3, 0, 2, 4) if layout is KVCacheLayout.HND else (1, 2, 0, 3, 4)


class HeadsThird(SlotsFirst):
    """A backend that indexes [blocks, 2, heads, slots, elements]."""

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return the axes as the kernel indexes them."""
        return (num_blocks, 2, num_kv_heads, block_size, head_size)


BACKENDS = {
    backend.__name__: backend for backend in (SlotsFirst, BlocksFirst, HeadsThird)
}


@dataclass
class CachedLayer:
    """The part of a layer that a cache needs."""

    spec: KVCacheSpec | None = None
    kv_sharing_target_layer_name: str | None = None
    kv_cache: Any = None
    calls: list[tuple[int, torch.dtype]] = field(default_factory=list)

    def get_kv_cache_spec(
        self, block_size: int, dtype: torch.dtype
    ) -> KVCacheSpec | None:
        """Return the spec of a block, and record the arguments."""
        self.calls.append((block_size, dtype))
        return self.spec


class NoAttention:
    """A layer without attention and without a cache."""


@dataclass(frozen=True)
class CachedModel:
    """The caches of a model.

    Args:
        tensors: The numbers of the layers that share each tensor, in the order of the groups.
        backends: The backend of each layer, by number.
        num_blocks: The number of blocks that can be allocated to requests.
        spare: The number of further blocks in every tensor.
        sharers: Layers without a cache of their own, each with the number of the layer whose cache
            it shares.
        layout: The name of the requested layout.
        is_from_environment: Whether the layout is read from the environment.
    """

    tensors: tuple[tuple[int, ...], ...]
    backends: tuple[tuple[int, str], ...]
    num_blocks: int
    spare: int
    sharers: tuple[tuple[int, int], ...]
    layout: str
    is_from_environment: bool

    def config(self) -> KVCacheConfig:
        """Return one group per position in a tensor. Page sizes are equal, specs differ."""
        indices = range(max(map(len, self.tensors), default=0))
        groups = [
            [name_of(names[n]) for names in self.tensors if n < len(names)]
            for n in indices
        ]
        size = (self.num_blocks + self.spare) * PAGE
        return KVCacheConfig(
            self.num_blocks,
            tuple(
                KVCacheTensor(size, tuple(map(name_of, layers)))
                for layers in self.tensors
            ),
            tuple(
                KVCacheGroupSpec(tuple(names), GROUP_SPECS[n % len(GROUP_SPECS)])
                for n, names in enumerate(groups)
            ),
        )

    def attn_backends(self) -> dict[str, Any]:
        """Return the backend of each layer."""
        return {name_of(number): BACKENDS[backend] for number, backend in self.backends}

    def layers(self) -> dict[str, Any]:
        """Return the layers, not sorted by number, and one layer without a cache."""
        numbers = [number for number, _ in self.backends]
        Random(len(numbers)).shuffle(numbers)
        layers: dict[str, Any] = {
            name_of(number): CachedLayer(kv_sharing_target_layer_name=name_of(target))
            for number, target in self.sharers[:1]
        }
        layers |= {name_of(number): CachedLayer() for number in numbers}
        layers["model.mlp"] = NoAttention()
        return layers | {
            name_of(number): CachedLayer(kv_sharing_target_layer_name=name_of(target))
            for number, target in self.sharers[1:]
        }


GROUP_SPECS = (
    SPEC,
    KVCacheSpec(8, 2, 8, torch.float8_e4m3fn),
    SlidingWindowSpec(2, 2, 8, torch.float32, sliding_window=3),
)


def name_of(number: int) -> str:
    """Return a layer's name; sorted as strings, 10 comes before 9."""
    return f"model.layers.{number}.attn"


@st.composite
def models(draw: st.DrawFn) -> CachedModel:
    """Return layers with own or shared tensors, of backends with different layouts."""
    pick = Random(draw(st.integers(0, 2**20)))
    numbers = pick.sample(range(120), 12)
    tensors = tuple(
        tuple(numbers.pop() for _ in range(pick.choice([1, 1, 2, 3])))
        for _ in range(pick.choice([0, 1, 2, 3]))
    )
    own = [number for layers in tensors for number in layers]
    sharers = tuple(
        (numbers.pop(), pick.choice(own)) for _ in range(pick.choice([0, 1, 2])) if own
    )
    return CachedModel(
        tensors,
        tuple((number, pick.choice(list(BACKENDS))) for number in own),
        num_blocks=pick.choice([0, 1, 2, 3]),
        spare=pick.choice([0, 0, 1]),
        sharers=sharers,
        layout=pick.choice(["NHD", "HND"]),
        is_from_environment=pick.random() < 0.5,
    )


@contextmanager
def layout_of(model: CachedModel) -> Iterator[KVCacheLayout | None]:
    """Yield the layout argument, or None if the layout comes from the environment."""
    before = os.environ.pop(KV_CACHE_LAYOUT_VARIABLE, None)
    other = {"NHD": "HND", "HND": "NHD"}[model.layout]
    passed = None if model.is_from_environment else KVCacheLayout[model.layout]
    # an argument takes precedence over the environment
    os.environ[KV_CACHE_LAYOUT_VARIABLE] = model.layout if passed is None else other
    try:
        yield passed
    finally:
        os.environ.pop(KV_CACHE_LAYOUT_VARIABLE)
        if before is not None:
            os.environ[KV_CACHE_LAYOUT_VARIABLE] = before


def expect_names(what: str, found: dict[str, Any], numbers: Sequence[int]) -> None:
    """Raise if the layers or their order differ."""
    expect_same(f"layers of {what}", list(found), list(map(name_of, numbers)))


def expect_caches(model: CachedModel, caches: dict[str, Tensor], raw: Any) -> None:
    """Raise if a cache is not a view of its tensor in the layout of its backend."""
    layout = KVCacheLayout[model.layout]
    backends = model.attn_backends()
    for group in model.config().kv_cache_groups:
        spec = group.kv_cache_spec
        for name in group.layer_names:
            shape = backends[name].get_kv_cache_shape(
                model.num_blocks + model.spare,
                spec.block_size,
                spec.num_kv_heads,
                spec.head_size,
            )
            order = backends[name].get_kv_cache_stride_order(layout)
            own = is_packed_in(order, shape)
            expect_view(name, caches[name], raw[name], shape, spec.dtype, own)


@law("allocate_kv_caches", cases=models())
def each_tensor_is_allocated_once_and_is_zero(
    setting: Setting, model: CachedModel
) -> None:
    """Layers of one tensor share all bytes; layers of different tensors share none."""
    raw = setting.candidate.allocate_kv_caches(model.config(), setting.device)
    expect_names("the bytes", raw, [n for numbers in model.tensors for n in numbers])
    size = (model.num_blocks + model.spare) * PAGE
    for tensor in raw.values():
        expect_same("bytes", tensor.cpu(), torch.zeros(size, dtype=torch.int8))
        expect_same("device", tensor.device.type, setting.device.type)
    for number, sharing in enumerate(model.tensors):
        raw[name_of(sharing[0])].fill_(number + 1)
    for number, sharing in enumerate(model.tensors):
        for layer in sharing:
            right = torch.full((size,), number + 1, dtype=torch.int8)
            expect_same("bytes that were written", raw[name_of(layer)].cpu(), right)


@law("reshape_kv_caches", cases=models())
def each_layer_gets_its_bytes_in_the_layout_of_its_backend(
    setting: Setting, model: CachedModel
) -> None:
    """An argument overrides the environment, which is read at every call."""
    size = (model.num_blocks + model.spare) * PAGE
    raw: dict[str, Tensor] = {}
    for number, sharing in enumerate(model.tensors):
        tensor = numbered_bytes(size + 64 * number, setting.device)[64 * number :]
        raw |= {name_of(layer): tensor for layer in sharing}
    config, backends = model.config(), model.attn_backends()
    with layout_of(model) as layout:
        caches = setting.candidate.reshape_kv_caches(config, raw, backends, layout)
    named = [name for group in config.kv_cache_groups for name in group.layer_names]
    expect_same("layers of the caches", list(caches), named)
    expect_caches(model, caches, raw)


@law("bind_kv_cache", cases=models())
def each_layer_is_bound_to_its_own_cache_or_the_one_it_shares(
    setting: Setting, model: CachedModel
) -> None:
    """Results are sorted by the number in the name; other layers do not get a cache."""
    numbers = [number for number, _ in model.backends]
    caches = {name_of(number): torch.full((1,), float(number)) for number in numbers}
    layers, before = model.layers(), dict(caches)
    found = setting.candidate.bind_kv_cache(caches, layers)
    expect_names("the caches", found, sorted(numbers))
    expect_same("kv_caches, which is only read", list(caches), list(before))
    targets = dict(model.sharers)
    for name, layer in layers.items():
        if isinstance(layer, NoAttention):
            expect_same("cache of no attention", hasattr(layer, "kv_cache"), False)
            continue
        number = int(name.split(".")[2])
        right = before[name_of(targets.get(number, number))]
        if layer.kv_cache is not right:
            raise Disagreement(name, "its cache", layer.kv_cache, right)
    for name, cache in found.items():
        if cache is not before[name]:
            raise Disagreement(name, "what is returned", cache, before[name])


@law("init_kv_cache", cases=models())
def a_model_gets_caches_that_are_zero_in_the_order_of_its_layers(
    setting: Setting, model: CachedModel
) -> None:
    """Layers that share bytes each have a view of them, in their own layout."""
    layers, config = model.layers(), model.config()
    backends = model.attn_backends()
    with layout_of(model) as layout:
        caches = setting.candidate.init_kv_cache(
            layers, config, backends, setting.device, layout
        )
    expect_names("the caches", caches, sorted(number for number, _ in model.backends))
    raw: dict[str, Tensor] = {}
    for number, sharing in enumerate(model.tensors):
        memory = memory_of(caches[name_of(sharing[0])])
        size = (model.num_blocks + model.spare) * PAGE
        zeros = torch.zeros(size, dtype=torch.uint8)
        expect_same("memory of a tensor", memory.cpu(), zeros)
        memory.copy_(numbered_bytes(size, setting.device) + number)
        raw |= {name_of(layer): memory.view(torch.int8) for layer in sharing}
    expect_caches(model, caches, raw)
    targets = dict(model.sharers)
    for name, layer in layers.items():
        if isinstance(layer, CachedLayer):
            number = int(name.split(".")[2])
            if layer.kv_cache is not caches[name_of(targets.get(number, number))]:
                raise Disagreement(
                    name, "its cache", layer.kv_cache, "the one returned"
                )


@law("get_kv_cache_spec", cases=DTYPES)
def only_layers_with_a_cache_have_a_spec(setting: Setting, dtype: torch.dtype) -> None:
    """Specs have the order of the layers; each layer's method is called once."""
    layers: dict[str, Any] = {
        "model.layers.9": CachedLayer(GROUP_SPECS[0]),
        "model.mlp": NoAttention(),
        "model.layers.2": CachedLayer(GROUP_SPECS[1]),
        "model.encoder.3": CachedLayer(None),
        "model.layers.10": CachedLayer(SPECS[-1]),
        "model.layers.11": CachedLayer(
            None, kv_sharing_target_layer_name="model.layers.9"
        ),
    }
    before = list(layers)
    found = setting.candidate.get_kv_cache_spec(layers, 24, dtype)
    keeping = ["model.layers.9", "model.layers.2", "model.layers.10"]
    expect_same("layers of the specs", list(found), keeping)
    for name, spec in found.items():
        if spec is not layers[name].spec:
            raise Disagreement(name, "its spec", spec, layers[name].spec)
    expect_same("layers, which are only read", list(layers), before)
    for name, layer in layers.items():
        if isinstance(layer, CachedLayer):
            expect_same(f"arguments of {name}", layer.calls, [(24, dtype)])
    expect_same(
        "specs of no layers", setting.candidate.get_kv_cache_spec({}, 4, dtype), {}
    )


ONE = CachedModel(
    ((3,),), ((3, "SlotsFirst"),), 2, 0, (), "NHD", is_from_environment=False
)
NAME = name_of(3)
REJECTED_MODELS: dict[str, dict[str, Any]] = {
    "a layer without bytes": {"raw": {}},
    "a layer without a backend": {"backends": {}},
    "fewer pages than blocks": {"raw": {NAME: some_bytes(PAGE)}},
    "bytes that are not whole pages": {"raw": {NAME: some_bytes(2 * PAGE + 2)}},
    "a cache without its layer": {"layers": {}},
    "a second cache without its layer": {
        "caches": {NAME: torch.zeros(1), name_of(4): torch.zeros(1)},
        "layers": {NAME: CachedLayer()},
    },
    "a layer of a cache that is not there": {
        "layers": {NAME: CachedLayer(), "l.4": CachedLayer(None, "model.layers.5.attn")}
    },
    "a name without a number": {
        "caches": {NAME: torch.zeros(1), "attn": torch.zeros(1)},
        "layers": {NAME: CachedLayer(), "attn": CachedLayer()},
    },
    "a name of two numbers": {
        "caches": {NAME: torch.zeros(1), "layers.1.experts.2": torch.zeros(1)},
        "layers": {NAME: CachedLayer(), "layers.1.experts.2": CachedLayer()},
    },
}


@law(
    "reshape_kv_caches",
    "bind_kv_cache",
    cases=list(REJECTED_MODELS),
    claim="rejects shapes",
)
def an_incomplete_model_is_rejected_and_no_layer_changed(
    setting: Setting, case: str
) -> None:
    """All arguments are validated before the first layer gets its cache."""
    given = REJECTED_MODELS[case]
    if "layers" in given:
        layers = given["layers"]
        caches = given.get("caches", {NAME: torch.zeros(1)})
        expect_rejection(case, lambda: setting.candidate.bind_kv_cache(caches, layers))
        for name, layer in layers.items():
            expect_same(f"cache of {name}", layer.kv_cache, None)
            layer.kv_cache = None
        return
    raw = given.get("raw", {NAME: some_bytes(2 * PAGE)})
    backends = given.get("backends", ONE.attn_backends())
    expect_rejection(
        case,
        lambda: setting.candidate.reshape_kv_caches(
            ONE.config(), raw, backends, KVCacheLayout.NHD
        ),
    )
