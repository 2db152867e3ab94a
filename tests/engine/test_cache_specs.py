"""Cache specs, cache configs and the groups of backends that are made from them."""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from pagetwin.contract.cache_formats import cache_dtype_of
from pagetwin.contract.kinds import AttentionType
from pagetwin.contract.layouts import KVCacheLayout
from pagetwin.contract.spec_memory import (
    EngineLimits,
    max_admission_blocks_per_request,
    max_memory_usage_bytes,
    max_num_blocks_per_req,
    merge_kv_cache_specs,
)
from pagetwin.contract.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    MultipleOf,
    SlidingWindowSpec,
)
from pagetwin.engine.backend_groups import AttentionGroup, init_attn_backend
from pagetwin.engine.backend_interface import AttentionBackend
from pagetwin.engine.layer import Attention
from pagetwin.engine.selector import load_backend
from support.twins import Twin

pytestmark = pytest.mark.quick

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
    """Return a config whose layers are in one group for each place in a tensor."""
    places = range(max(map(len, tensors), default=0))
    groups = [[names[n] for names in tensors if n < len(names)] for n in places]
    return KVCacheConfig(
        num_blocks,
        [KVCacheTensor(num_blocks * PAGE, names) for names in tensors],
        [KVCacheGroupSpec(names, SPEC) for names in groups],
    )


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


# ---- configs and specs


def test_a_config_whose_lists_differ_is_rejected() -> None:
    group, tensor = KVCacheGroupSpec(["m.0"], SPEC), KVCacheTensor(PAGE, ["m.0"])
    with pytest.raises(ValueError, match="is in kv_cache_groups but not in"):
        KVCacheConfig(1, [], [group])
    with pytest.raises(ValueError, match="is in kv_cache_tensors but not in"):
        KVCacheConfig(1, [tensor], [])
    with pytest.raises(ValueError, match="is 2 times in kv_cache_tensors"):
        KVCacheConfig(1, [tensor, tensor], [group])
    with pytest.raises(ValueError, match="is 2 times in kv_cache_groups"):
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


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({"head_size_v": 4}, (384, 384, 1)),
        ({"page_size_padded": 600}, (600, 512, 1)),
        ({"num_head_slots": 3, "state_content_bytes": 5}, (240, 240, 1)),
        ({"tokens_per_state": 8}, (64, 64, 1)),
        ({"tokens_per_state": Fraction(1, 2)}, (1024, 1024, 1)),
        ({"block_stride_alignment": 512}, (512, 512, 512)),
        ({"block_stride_alignment": MultipleOf(12)}, (512, 512, 128)),
        ({"block_stride_alignment": MultipleOf(32)}, (512, 512, 1)),
    ],
)
def test_a_page_has_the_padding_and_the_cells_of_its_fields(
    fields: dict[str, Any], sizes: tuple[int, int, int]
) -> None:
    spec = KVCacheSpec(16, 2, 8, torch.float8_e4m3fn, **fields)
    assert sizes == (
        spec.page_size_bytes,
        spec.real_page_size_bytes,
        spec.block_stride_alignment_bytes,
    )
    is_plain = fields.keys() <= {"page_size_padded", "block_stride_alignment"}
    assert spec.has_plain_cells == is_plain
    reasons = REFERENCE.why_not(spec)
    is_usual = is_plain and "page_size_padded" not in fields
    assert is_usual or any("a page of" in reason for reason in reasons)


def test_the_alignment_of_latents_follows_a_new_block_size() -> None:
    spec = MLAAttentionSpec(64, 1, 576, state_content_bytes=656, alignment=576)
    assert (spec.page_size_bytes, spec.real_page_size_bytes) == (42048, 41984)
    assert replace(spec, block_size=72).page_size_bytes == 47232


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"head_size_v": 0}, "head_size_v = 0: expected at least 1"),
        ({"state_content_bytes": 0}, "state_content_bytes = 0: expected at least 1"),
        ({"page_size_padded": 1023}, "page_size_padded = 1023: expected at least 1024"),
        ({"tokens_per_state": 17}, "tokens_per_state = 17: .* at most block_size = 16"),
        ({"tokens_per_state": 0}, "tokens_per_state = 0: expected more than 0"),
        ({"block_stride_alignment": -4}, "block_stride_alignment = -4: expected at"),
    ],
)
def test_fields_that_make_no_page_are_rejected(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        KVCacheSpec(16, 2, 8, torch.float16, **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"alignment": 0}, "alignment = 0: expected at least 1"),
        ({"head_size_v": 8}, "head_size_v = 8: expected None"),
        ({"alignment": 64, "page_size_padded": 99999}, "expected one of them"),
    ],
)
def test_fields_that_a_page_of_latents_cannot_have_are_rejected(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        MLAAttentionSpec(16, 1, 8, torch.float16, **fields)


LIMITS = EngineLimits(
    max_model_len=1000, max_in_flight_tokens=512, max_num_encoder_input_tokens=1500
)


@pytest.mark.parametrize(
    ("spec", "blocks"),
    [
        (FullAttentionSpec(16, 2, 8), 63),
        (MLAAttentionSpec(16, 1, 576), 63),
        (SlidingWindowSpec(16, 2, 8, sliding_window=100), 40),
        (SlidingWindowSpec(16, 2, 8, sliding_window=4096), 64),
        (ChunkedLocalAttentionSpec(16, 2, 8, attention_chunk_size=256), 48),
        (CrossAttentionSpec(16, 2, 8), 94),
    ],
)
def test_a_request_needs_the_blocks_that_its_layers_keep(
    spec: KVCacheSpec, blocks: int
) -> None:
    assert max_admission_blocks_per_request(spec, LIMITS) == blocks
    assert max_memory_usage_bytes(spec, LIMITS) == blocks * spec.page_size_bytes


def test_ranks_divide_the_keys_of_layers_that_let_them() -> None:
    limits = replace(LIMITS, decode_context_parallel_size=2)
    whole = FullAttentionSpec(16, 2, 8)
    window = SlidingWindowSpec(16, 2, 8, sliding_window=100)
    assert max_num_blocks_per_req(whole, 1000, 2) == 32
    assert max_num_blocks_per_req(replace(whole, dcp_sharded=False), 1000, 2) == 63
    assert max_memory_usage_bytes(whole, limits) == 32 * whole.page_size_bytes
    with pytest.raises(
        ValueError, match="decode_context_parallel_size = 2: expected 1"
    ):
        max_memory_usage_bytes(window, limits)
    alone = replace(window, dcp_sharded=False)
    assert max_memory_usage_bytes(alone, limits) == 40 * window.page_size_bytes


def test_layers_of_a_group_differ_in_their_visible_keys_alone() -> None:
    whole = FullAttentionSpec(16, 2, 8)
    window = replace(whole, sliding_window=100)
    assert merge_kv_cache_specs([whole, window, whole]) == window
    for others, words in (
        ([], "specs is empty"),
        ([window, replace(whole, sliding_window=5)], r"specs\[1\].sliding_window = 5"),
        ([window, replace(whole, attention_chunk_size=8)], "expected one of them"),
        (
            [whole, replace(whole, head_size=16)],
            r"specs\[1\].head_size = 16: expected 8",
        ),
        ([whole, CrossAttentionSpec(16, 2, 8)], r"specs\[1\] is a CrossAttentionSpec"),
    ):
        with pytest.raises(ValueError, match=words):
            merge_kv_cache_specs(others)


def test_windows_and_chunks_out_of_range_are_rejected() -> None:
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
    layers = {
        f"m.{n}": Layer(backend) for n, backend in enumerate([Plain, Working, Plain])
    }
    groups = [KVCacheGroupSpec(["m.0", "m.1", "m.2"], SPEC)]
    backends, made = init_attn_backend(groups, layers, "cpu")
    assert backends == {"m.0": Plain, "m.1": Working, "m.2": Plain}
    assert [group.layer_names for group in made] == [("m.0", "m.2"), ("m.1",)]
    for group in made:
        assert isinstance(group, AttentionGroup) and group.kv_cache_group_id == 0
        names = list(group.layer_names)
        assert group.metadata_builder.built == (SPEC, names, "cpu")


def test_one_workspace_serves_all_builders_that_need_one() -> None:
    backends = [Plain, Working, Working, Plain, Working]
    layers = {f"m.{n}": Layer(backend) for n, backend in enumerate(backends)}
    groups = [KVCacheGroupSpec([name], SPEC) for name in layers]
    _, made = init_attn_backend(groups, layers, "cpu")
    assert [group.kv_cache_group_id for group in made] == list(range(5))
    workspaces = [
        group.metadata_builder.workspace
        for group in made
        if isinstance(group.metadata_builder, BuilderWithWorkspace)
    ]
    assert len(workspaces) == 3 and workspaces[0] is not None
    assert all(workspace is workspaces[0] for workspace in workspaces)


def test_an_empty_group_and_an_unknown_layer_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_groups\[0\] has no layers"):
        init_attn_backend([KVCacheGroupSpec([], SPEC)], {}, "cpu")
    groups = [KVCacheGroupSpec(["m.0"], SPEC)]
    with pytest.raises(KeyError, match=r"'m.0' is missing in static_forward_context"):
        init_attn_backend(groups, {"m.1": Layer()}, "cpu")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("auto", torch.bfloat16),
        ("fp8", torch.float8_e4m3fn),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
    ],
)
def test_a_cache_dtype_has_the_name_that_vllm_gives_it(
    name: str, dtype: torch.dtype
) -> None:
    assert cache_dtype_of(name, torch.bfloat16) == dtype


@pytest.mark.parametrize("name", ["fp4", "", "FP8", "float8_e4m3fn"])
def test_an_unknown_cache_dtype_is_rejected_with_those_there_are(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"{name!r}: expected auto, fp8, fp8_inc, fp8_e4m3"
    ):
        cache_dtype_of(name, torch.bfloat16)


@pytest.mark.parametrize("field", ["block_size", "num_kv_heads", "head_size"])
def test_a_spec_without_elements_is_rejected(field: str) -> None:
    numbers = {"block_size": 16, "num_kv_heads": 2, "head_size": 8} | {field: 0}
    with pytest.raises(ValueError, match=f"{field} = 0: expected at least 1"):
        KVCacheSpec(**numbers)
