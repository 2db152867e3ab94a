"""Does every layer of a model get the cache that the config says?"""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.contract.kinds import FP8_DTYPES, AttentionType, cache_dtype_of
from pagetwin.contract.layouts import KVCacheLayout
from pagetwin.contract.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from pagetwin.engine.backend_groups import AttentionGroup, init_attn_backend
from pagetwin.engine.backend_interface import AttentionBackend
from pagetwin.engine.layer import Attention
from pagetwin.engine.selector import load_backend

SPEC = KVCacheSpec(4, 2, 8, torch.float16)
PAGE = SPEC.page_size_bytes
REFERENCE = load_backend("REFERENCE")
NHD, HND = KVCacheLayout.NHD, KVCacheLayout.HND


@dataclass
class Layer:
    """As much of a layer as a cache needs."""

    backend: type[AttentionBackend] = REFERENCE
    kv_sharing_target_layer_name: str | None = None
    kv_cache: Any = None

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.backend


def config_of(tensors: list[list[str]], num_blocks: int = 3) -> KVCacheConfig:
    """Return a config whose layers stand in one group for each place in a tensor."""
    places = range(max(map(len, tensors), default=0))
    groups = [[names[n] for names in tensors if n < len(names)] for n in places]
    return KVCacheConfig(
        num_blocks,
        [KVCacheTensor(num_blocks * PAGE, names) for names in tensors],
        [KVCacheGroupSpec(names, SPEC) for names in groups],
    )


@given(data=st.data())
def test_each_tensor_is_allocated_once_and_seen_by_its_layers(
    data: st.DataObject, twin: Twin, device: torch.device
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), max_size=3))
    num_blocks = data.draw(st.integers(0, 3))
    numbers = data.draw(st.permutations(range(30)))
    tensors = [[f"m.{numbers.pop()}.attn" for _ in range(size)] for size in sizes]
    config = config_of(tensors, num_blocks)
    raw = twin.allocate_kv_caches(config, device)
    assert list(raw) == [name for names in tensors for name in names]
    for tensor in raw.values():
        assert tensor.dtype == torch.int8 and tensor.device.type == device.type
        assert tensor.numel() == num_blocks * PAGE and not tensor.any()
    layout = data.draw(st.sampled_from([NHD, HND]))
    caches = twin.reshape_kv_caches(config, raw, dict.fromkeys(raw, REFERENCE), layout)
    groups = [name for group in config.kv_cache_groups for name in group.layer_names]
    assert list(caches) == groups
    for number, names in enumerate(tensors):
        caches[names[0]].fill_(number + 1)
        assert len({raw[name].data_ptr() for name in names}) == 1
    for number, names in enumerate(tensors):
        for name in names:
            assert tuple(caches[name].shape) == (2, num_blocks, 4, 2, 8)
            assert bool((caches[name] == number + 1).all())
    layers = {name: Layer() for name in Random(0).sample(list(raw), len(raw))}
    bound = twin.bind_kv_cache(caches, layers)
    assert list(bound) == sorted(caches, key=lambda name: int(name.split(".")[1]))
    for name, layer in layers.items():
        assert layer.kv_cache is bound[name] is caches[name]


def test_layers_of_one_tensor_may_see_it_in_different_orders(twin: Twin) -> None:
    class HeadsFirst(REFERENCE):
        @classmethod
        def get_kv_cache_stride_order(cls, layout: KVCacheLayout) -> tuple[int, ...]:
            return (1, 3, 0, 2, 4)

    config = config_of([["m.0", "m.1"]])
    raw = twin.allocate_kv_caches(config)
    backends = {"m.0": REFERENCE, "m.1": HeadsFirst}
    caches = twin.reshape_kv_caches(config, raw, backends, NHD)
    caches["m.1"][1, 2, 3, 1, 5] = 7
    place = (((2 * 2 + 1) * 2 + 1) * 4 + 3) * 8 + 5
    assert caches["m.0"].flatten()[place] == 7 == raw["m.0"].view(torch.float16)[place]


def test_the_layout_is_an_argument_or_comes_from_the_environment(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of([["m.0"]])
    raw, backends = twin.allocate_kv_caches(config), {"m.0": REFERENCE}
    monkeypatch.setenv("PAGETWIN_KV_CACHE_LAYOUT", "HND")
    for layout, strides in ((None, (8, 32)), (NHD, (16, 8)), (HND, (8, 32))):
        cache = twin.reshape_kv_caches(config, raw, backends, layout)["m.0"]
        assert cache.stride()[2:4] == strides
    with pytest.raises(ValueError, match="layout = BLNHC: expected one that begins"):
        twin.reshape_kv_caches(config, raw, backends, KVCacheLayout.BLNHC)


def test_init_gives_what_the_three_steps_give(twin: Twin, device: torch.device) -> None:
    layers = {name: Layer() for name in ("m.10.attn", "m.9.attn", "m.2.attn")}
    config = config_of([["m.10.attn"], ["m.9.attn"], ["m.2.attn"]])
    backends = dict.fromkeys(layers, REFERENCE)
    caches = twin.init_kv_cache(layers, config, backends, device)
    assert list(caches) == ["m.2.attn", "m.9.attn", "m.10.attn"]
    assert all(layers[name].kv_cache is cache for name, cache in caches.items())
    assert all(not cache.any() for cache in caches.values())
    assert all(cache.device.type == device.type for cache in caches.values())


@pytest.mark.parametrize("dtype", FP8_DTYPES)
@pytest.mark.parametrize("layout", [NHD, HND])
def test_layers_of_eight_and_of_sixteen_bits_see_their_own_bytes(
    dtype: torch.dtype, layout: KVCacheLayout, twin: Twin, device: torch.device
) -> None:
    """In one tensor, where a page of eight bits has twice the slots of one of sixteen."""
    eight = replace(SPEC, dtype=dtype, block_size=2 * SPEC.block_size)
    assert eight.page_size_bytes == PAGE
    config = KVCacheConfig(
        3,
        [KVCacheTensor(3 * PAGE, ["m.0", "m.1"])],
        [KVCacheGroupSpec(["m.0"], eight), KVCacheGroupSpec(["m.1"], SPEC)],
    )
    raw = twin.allocate_kv_caches(config, device)
    backends = dict.fromkeys(raw, REFERENCE)
    caches = twin.reshape_kv_caches(config, raw, backends, layout)
    cache = caches["m.0"]
    assert cache.dtype == dtype and tuple(cache.shape) == (2, 3, 8, 2, 8)
    assert not cache.float().any() and caches["m.1"].dtype == SPEC.dtype
    key, value = torch.ones(2, 1, 2, 8, device=device)
    slots = torch.tensor([2 * 8 + 5], device=device)
    twin.reshape_and_cache(key, value, cache[0], cache[1], slots, 0.5, 0.25)
    strides = (1, 8) if layout == HND else (2, 1)
    for half, number in enumerate((2, 4)):
        for head in range(2):
            slot = (half * 3 + 2) * 16 + 5 * strides[0] + head * strides[1]
            held = raw["m.0"].view(dtype).float()[8 * slot : 8 * slot + 8]
            assert held.tolist() == [number] * 8
    assert int(raw["m.0"].count_nonzero()) == 32


def test_a_spec_takes_the_dtype_that_vllms_name_stands_for(twin: Twin) -> None:
    layers: dict[str, Any] = {}
    any_layer(layers, "m.0")
    (spec,) = twin.get_kv_cache_spec(
        layers, 16, cache_dtype_of("fp8_e5m2", torch.bfloat16)
    ).values()
    assert spec == FullAttentionSpec(16, 2, 8, torch.float8_e5m2)
    assert spec.page_size_bytes == 2 * 16 * 2 * 8


def test_a_layer_that_shares_is_handed_the_other_ones_cache(twin: Twin) -> None:
    layers = {"m.0": Layer(), "m.1": Layer(kv_sharing_target_layer_name="m.0")}
    caches = twin.init_kv_cache(layers, config_of([["m.0"]]), {"m.0": REFERENCE})
    assert list(caches) == ["m.0"]
    assert layers["m.1"].kv_cache is layers["m.0"].kv_cache is caches["m.0"]
    with pytest.raises(KeyError, match=r"'m.1' shares the cache of 'm.0', which has"):
        twin.bind_kv_cache({}, {"m.1": layers["m.1"]})


def test_two_layers_of_one_number_both_get_their_caches(twin: Twin) -> None:
    """As a decoder's self and cross attention; vLLM refuses them or skips the second."""
    names = ["m.0.cross_attn", "m.0.attn", "l.0"]
    layers = {name: Layer() for name in names}
    caches = {name: torch.zeros(1) for name in names}
    assert list(twin.bind_kv_cache(caches, layers)) == names
    assert all(layers[name].kv_cache is caches[name] for name in names)


@pytest.mark.parametrize(("name", "count"), [("attn", 0), ("m.1.experts.2", 2)])
def test_a_name_without_one_number_is_refused(
    name: str, count: int, twin: Twin
) -> None:
    layers = {"m.0": Layer(), name: Layer()}
    caches = {each: torch.zeros(1) for each in layers}
    with pytest.raises(ValueError, match=f"{name!r} has {count} numbers in its name"):
        twin.bind_kv_cache(caches, layers)
    assert layers["m.0"].kv_cache is None, "nothing is bound before all is checked"


def test_a_cache_without_its_layer_is_refused(twin: Twin) -> None:
    layers = {"m.0": Layer()}
    caches = {"m.0": torch.zeros(1), "m.1": torch.zeros(1)}
    with pytest.raises(KeyError, match=r"'m.1' is missing in static_forward_context"):
        twin.bind_kv_cache(caches, layers)
    assert layers["m.0"].kv_cache is None


def test_bytes_that_are_no_whole_pages_or_too_few_are_refused(twin: Twin) -> None:
    config = config_of([["m.0"]], num_blocks=2)
    raw = {"m.0": torch.zeros(2 * PAGE - 2, dtype=torch.int8)}
    backends = {"m.0": REFERENCE}
    with pytest.raises(ValueError, match=f"m.0 has {2 * PAGE - 2} bytes: expected a"):
        twin.reshape_kv_caches(config, raw, backends)
    raw = {"m.0": torch.zeros(PAGE, dtype=torch.int8)}
    with pytest.raises(ValueError, match="holds 1 pages: expected at least num_blocks"):
        twin.reshape_kv_caches(config, raw, backends)
    with pytest.raises(KeyError, match=r"'m.0' is missing in attn_backends"):
        twin.reshape_kv_caches(config, raw, {})
    with pytest.raises(KeyError, match=r"'m.0' is missing in kv_cache_raw_tensors"):
        twin.reshape_kv_caches(config, {}, backends)


# ---- configs and specs


def test_a_config_whose_lists_differ_is_refused() -> None:
    group, tensor = KVCacheGroupSpec(["m.0"], SPEC), KVCacheTensor(PAGE, ["m.0"])
    with pytest.raises(ValueError, match="stands in kv_cache_groups but not in"):
        KVCacheConfig(1, [], [group])
    with pytest.raises(ValueError, match="stands in kv_cache_tensors but not in"):
        KVCacheConfig(1, [tensor], [])
    with pytest.raises(ValueError, match="stands 2 times in kv_cache_tensors"):
        KVCacheConfig(1, [tensor, tensor], [group])
    with pytest.raises(ValueError, match="stands 2 times in kv_cache_groups"):
        KVCacheConfig(1, [tensor], [group, group])
    with pytest.raises(ValueError, match="size = -1: expected at least 0"):
        KVCacheTensor(-1, [])
    with pytest.raises(ValueError, match="num_blocks = -1"):
        KVCacheConfig(-1, [], [])


def test_a_config_keeps_no_list_of_its_caller() -> None:
    names = ["m.0"]
    config = config_of([names])
    names.append("m.1")
    assert config.kv_cache_tensors[0].shared_by == ("m.0",)
    assert hash(config) == hash(config_of([["m.0"]]))


@pytest.mark.parametrize(
    ("spec", "page"),
    [
        (KVCacheSpec(16, 2, 8, torch.float16), 1024),
        (FullAttentionSpec(16, 2, 8, torch.float16, sliding_window=4), 1024),
        (SlidingWindowSpec(16, 2, 8, torch.uint8, sliding_window=4), 512),
        (ChunkedLocalAttentionSpec(16, 2, 8, attention_chunk_size=32), 1024),
        (CrossAttentionSpec(16, 2, 8, torch.float32), 2048),
        (MLAAttentionSpec(16, 1, 576, torch.bfloat16), 18432),
        (FullAttentionSpec(16, 2, 8, torch.float8_e4m3fn), 512),
        (MLAAttentionSpec(16, 1, 576, torch.float8_e5m2), 9216),
    ],
)
def test_a_page_has_the_bytes_of_its_kind(spec: KVCacheSpec, page: int) -> None:
    assert spec.page_size_bytes == page
    assert replace(spec, block_size=32).page_size_bytes == 2 * page
    with pytest.raises(ValueError, match="head_size = 0: expected at least 1"):
        replace(spec, head_size=0)


def test_windows_and_chunks_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="sliding_window = -1: expected at least 0"):
        SlidingWindowSpec(16, 2, 8, sliding_window=-1)
    with pytest.raises(ValueError, match="attention_chunk_size = 0: expected at least"):
        ChunkedLocalAttentionSpec(16, 2, 8, attention_chunk_size=0)


def any_layer(layers: dict[str, Any], name: str, **options: Any) -> None:
    options.setdefault("attn_backend", TakesAll)
    Attention(4, 8, 1.0, 2, prefix=name, static_forward_context=layers, **options)


class TakesAll(REFERENCE):
    """A backend whose layers take every option."""

    @staticmethod
    def get_impl_cls() -> Any:
        return TakesAllImpl


class TakesAllImpl:
    def __init__(self, *numbers: Any, **options: Any) -> None:
        self.scale = numbers[2]


def test_each_kind_of_layer_keeps_its_kind_of_cache(twin: Twin) -> None:
    layers: dict[str, Any] = {"rope": torch.nn.Linear(2, 2)}
    any_layer(layers, "m.0")
    any_layer(layers, "m.1", per_layer_sliding_window=0)
    any_layer(layers, "m.2", kv_sharing_target_layer_name="m.0")
    any_layer(layers, "m.3", attn_type=AttentionType.ENCODER_DECODER)
    any_layer(layers, "m.4", attn_type="encoder_only")
    any_layer(layers, "m.5", attn_type="encoder")
    any_layer(layers, "m.6", use_mla=True)
    sizes = 16, 2, 8, torch.bfloat16
    assert twin.get_kv_cache_spec(layers, 16, torch.bfloat16) == {
        "m.0": FullAttentionSpec(*sizes),
        "m.1": SlidingWindowSpec(*sizes, sliding_window=0),
        "m.3": CrossAttentionSpec(*sizes),
        "m.6": MLAAttentionSpec(*sizes),
    }
    assert twin.get_kv_cache_spec({}, 16, torch.bfloat16) == {}
    with pytest.raises(ValueError, match="block_size = 0"):
        twin.get_kv_cache_spec(layers, 0, torch.bfloat16)


# ---- backends of groups


class Builder:
    """A builder that counts its workspaces."""

    def __init__(self, spec: KVCacheSpec, layer_names: list[str], device: Any) -> None:
        self.built = spec, layer_names, device


class BuilderWithWorkspace(Builder):
    workspace: torch.Tensor | None = None

    def get_workspace_buffer(self) -> torch.Tensor:
        self.workspace = torch.zeros(3)
        return self.workspace

    def set_workspace_buffer(self, buffer: torch.Tensor) -> None:
        self.workspace = buffer


class Plain(REFERENCE):
    get_builder_cls = staticmethod(lambda: Builder)


class Working(REFERENCE):
    get_builder_cls = staticmethod(lambda: BuilderWithWorkspace)


def test_a_group_of_two_backends_has_two_builders() -> None:
    """vLLM gave every layer of a group the builder of the first one's backend."""
    layers = {f"m.{n}": Layer(each) for n, each in enumerate([Plain, Working, Plain])}
    groups = [KVCacheGroupSpec(["m.0", "m.1", "m.2"], SPEC)]
    backends, made = init_attn_backend(groups, layers, "cpu")
    assert backends == {"m.0": Plain, "m.1": Working, "m.2": Plain}
    assert [each.layer_names for each in made] == [("m.0", "m.2"), ("m.1",)]
    for each in made:
        assert isinstance(each, AttentionGroup) and each.kv_cache_group_id == 0
        names = list(each.layer_names)
        assert each.metadata_builder.built == (SPEC, names, "cpu")


def test_one_workspace_serves_all_builders_that_need_one() -> None:
    backends = [Plain, Working, Working, Plain, Working]
    layers = {f"m.{n}": Layer(each) for n, each in enumerate(backends)}
    groups = [KVCacheGroupSpec([name], SPEC) for name in layers]
    _, made = init_attn_backend(groups, layers, "cpu")
    assert [each.kv_cache_group_id for each in made] == list(range(5))
    workspaces = [
        each.metadata_builder.workspace
        for each in made
        if isinstance(each.metadata_builder, BuilderWithWorkspace)
    ]
    assert len(workspaces) == 3 and workspaces[0] is not None
    assert all(each is workspaces[0] for each in workspaces)


def test_an_empty_group_and_an_unknown_layer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_groups\[0\] has no layers"):
        init_attn_backend([KVCacheGroupSpec([], SPEC)], {}, "cpu")
    groups = [KVCacheGroupSpec(["m.0"], SPEC)]
    with pytest.raises(KeyError, match=r"'m.0' is missing in static_forward_context"):
        init_attn_backend(groups, {"m.1": Layer()}, "cpu")
