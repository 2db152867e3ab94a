"""Does a layer hold, pass on and attend as a model expects it to?"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.contract.budgets import judge_rows
from pagetwin.contract.kinds import AttentionType
from pagetwin.contract.layouts import KVCacheLayout
from pagetwin.contract.specs import (
    CacheConfig,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from pagetwin.engine.backend_interface import AttentionBackend
from pagetwin.engine.layer import Attention
from pagetwin.engine.selector import load_backend
from support.twins import TWINS, Twin
from torch import Tensor, nn

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 32, 16
NAMES = ["m.0.attn", "m.1.attn", "m.2.attn"]

pytestmark = pytest.mark.usefixtures("installed")


class Model:
    """Three layers, the last of which reads the cache of the first; and what they must give."""

    def __init__(
        self,
        backend: str,
        twin: Twin,
        device: torch.device,
        layout: KVCacheLayout,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.twin, self.device, self.dtype = twin, device, dtype
        self.layers: dict[str, Attention] = {}
        for name in NAMES:
            Attention(
                HEADS,
                SIZE,
                SIZE**-0.5,
                KV_HEADS,
                prefix=name,
                attn_backend=load_backend(backend),
                kv_sharing_target_layer_name=NAMES[0] if name == NAMES[2] else None,
                static_forward_context=self.layers,
            )
        specs = twin.get_kv_cache_spec(self.layers, BLOCK, dtype)
        assert list(specs) == NAMES[:2]
        size = 8 * specs[NAMES[0]].page_size_bytes
        config = KVCacheConfig(
            8,
            [KVCacheTensor(size, [name]) for name in specs],
            [KVCacheGroupSpec(specs, specs[NAMES[0]])],
        )
        backends = {
            name: own_layer.get_attn_backend()
            for name, own_layer in self.layers.items()
        }
        twin.init_kv_cache(self.layers, config, backends, device, layout)
        builder = backends[NAMES[0]].get_builder_cls()
        self.builder = builder(specs[NAMES[0]], NAMES, device)
        self.rows = [[6, 1, 3], [5, 0, 2]]
        # by layer and request, all keys and values so far: what dense attention reads
        self.seen: dict[tuple[str, int], list[Tensor]] = {}

    def step(self, new: list[int], old: list[int], padding: int) -> None:
        """Run every layer once, and hold each row against dense attention."""
        common = self.twin.build_common_attn_metadata(
            new, old, self.rows, BLOCK, self.device
        )
        # the last layer has no cache of its own, and so no entry either
        metadata = dict.fromkeys(NAMES[:2], self.builder.build(0, common))
        tokens = sum(new)
        for name, layer in self.layers.items():
            widths = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]
            fused = torch.randn(tokens + padding, sum(widths)).to(self.dtype)
            # slices of one projection, as a model makes them
            parts = fused.to(self.device).split(widths, dim=1)
            output = layer(*parts, metadata)
            assert output.shape == parts[0].shape
            assert not output[tokens:].any(), "rows of padding are zero"
            self.judge(name, new, [part.cpu().double() for part in parts], output)

    def judge(
        self, name: str, new: list[int], parts: list[Tensor], output: Tensor
    ) -> None:
        owner = self.layers[name].kv_sharing_target_layer_name or name
        begin = 0
        answers: list[list[Tensor]] = [[], [], []]
        for req, count in enumerate(new):
            rows = slice(begin, begin + count)
            begin += count
            query, key, value = (
                part[rows].unflatten(1, (-1, SIZE)).transpose(0, 1) for part in parts
            )
            if owner == name:
                history = self.seen.setdefault((name, req), [key[:, :0], key[:, :0]])
                both = zip(history, (key, value), strict=True)
                self.seen[name, req] = [torch.cat(pair, 1) for pair in both]
            keys, values = self.seen[owner, req]
            length = keys.shape[1]
            mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            # the truth, what plain torch loses in this dtype, and the size of what is averaged
            for place, (dtype, averaged) in enumerate(
                (
                    (torch.float64, values),
                    (self.dtype, values),
                    (torch.float64, values.abs()),
                )
            ):
                dense = nn.functional.scaled_dot_product_attention(
                    query.to(dtype),
                    keys.to(dtype),
                    averaged.to(dtype),
                    attn_mask=mask,
                    enable_gqa=True,
                )
                answers[place].append(dense.transpose(0, 1))
        exact, same, sizes = (torch.cat(rows) for rows in answers)
        found = output[:begin].cpu().unflatten(1, (-1, SIZE))
        verdict = judge_rows(found, exact, same, self.dtype, sizes)
        assert verdict.ok, verdict


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", [KVCacheLayout.NHD, KVCacheLayout.HND])
@pytest.mark.parametrize("backend", ["REFERENCE", "TRITON", "XFORMERS"])
def test_prefills_and_decodes_equal_dense_attention(
    backend: str, layout: KVCacheLayout, device: torch.device
) -> None:
    """Two prompts, a chunk beside a decode, decodes; the last layer reads the first's cache."""
    torch.manual_seed(0)
    dtype = torch.float16 if backend == "XFORMERS" else torch.float32
    twin = TWINS["reference" if backend == "REFERENCE" else "optimized"]
    model = Model(backend, twin, device, layout, dtype)
    model.step([5, 17], [0, 0], padding=1)
    model.step([1, 14], [5, 17], padding=0)
    for step in range(2):
        model.step([1, 1], [6 + step, 31 + step], padding=2 * step)


def test_a_layer_that_shares_writes_nothing(device: torch.device) -> None:
    """Neither in a backend that knows of sharing nor in one that does not."""

    class WritesAlways(load_backend("REFERENCE")):
        @staticmethod
        def get_impl_cls() -> Any:
            return lambda *numbers: load_backend("REFERENCE").get_impl_cls()(*numbers)

        @classmethod
        def supports_option(cls, name: str) -> bool:
            return False

    for backend in (load_backend("REFERENCE"), WritesAlways):
        layers: dict[str, Attention] = {}
        Attention(
            2, 8, 1.0, prefix="m.0", attn_backend=backend, static_forward_context=layers
        )
        sharing = Attention(
            2,
            8,
            1.0,
            prefix="m.1",
            attn_backend=backend,
            kv_sharing_target_layer_name="m.0",
            static_forward_context=layers,
        )
        sharing.kv_cache = torch.randn(2, 1, 4, 2, 8)
        before = sharing.kv_cache.clone()
        twin = TWINS["reference"]
        common = twin.build_common_attn_metadata([3], [0], [[0]], 4)
        spec = twin.get_kv_cache_spec(layers, 4, torch.float32)["m.0"]
        metadata = backend.get_builder_cls()(spec, ["m.1"], "cpu").build(0, common)
        output = sharing(*torch.randn(3, 3, 16), metadata)
        assert torch.equal(sharing.kv_cache, before)
        assert bool(output.any()), "it attends all the same"
        assert metadata.slot_mapping.shape[0] == 3, "the metadata is left as it is"


# ---- quantised caches, cross-attention, values of another size


def make_layers(backend: str, *names: str, **options: Any) -> dict[str, Attention]:
    """Return layers; a second one shares the cache of the first."""
    layers: dict[str, Attention] = {}
    for name in names:
        Attention(
            HEADS,
            SIZE,
            SIZE**-0.5,
            KV_HEADS,
            prefix=name,
            attn_backend=load_backend(backend),
            kv_sharing_target_layer_name=None if name == names[0] else names[0],
            static_forward_context=layers,
            **options,
        )
    return layers


def steps_of(
    layer: Attention, device: torch.device, dtype: torch.dtype = torch.float16
) -> Any:
    """Return a function that builds the metadata of steps with one request, and its cache."""
    spec = layer.get_kv_cache_spec(BLOCK, dtype)
    backend = layer.get_attn_backend()
    builder = backend.get_builder_cls()(spec, ["layer"], device)
    layer.kv_cache = torch.zeros(
        backend.get_kv_cache_shape(4, BLOCK, KV_HEADS, SIZE),
        dtype=spec.dtype,
        device=device,
    )

    def build(new: int, old: int, **fields: Any) -> Any:
        twin = TWINS["reference"]
        common = twin.build_common_attn_metadata([new], [old], [[2]], BLOCK, device)
        return builder.build(0, common.replace(**fields))

    return build


def activations(tokens: int, device: torch.device) -> list[Tensor]:
    return [
        torch.randn(tokens, heads * SIZE).half().to(device)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


BACKEND_NAMES = ["REFERENCE", "TRITON", "XFORMERS"]


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_measured_scales_are_those_the_cache_is_written_and_read_with(
    backend: str, device: torch.device
) -> None:
    """In the very step that measures them, in later ones, and by the layer that shares."""
    torch.manual_seed(0)
    config = CacheConfig(cache_dtype="fp8", calculate_kv_scales=True)
    owner, sharing = make_layers(backend, "m.0", "m.1", cache_config=config).values()
    owner.to(device)
    sharing.to(device)
    build = steps_of(owner, device)
    assert owner.kv_cache.dtype == torch.float8_e4m3fn
    sharing.kv_cache = owner.kv_cache
    keys: list[Tensor] = []
    for step, (new, old) in enumerate(((5, 0), (1, 5))):
        query, key, value = activations(new, device)
        value = value * 3
        keys.append(key)
        metadata = build(new, old)
        outputs = [
            owner(query, key, value, metadata),
            # what it is given is neither written nor measured
            sharing(query, 1000 * key, 1000 * value, metadata),
        ]
        assert torch.equal(*outputs) and bool(outputs[0].isfinite().all())
        if step == 0:
            k_scale = float(key.abs().max().float() / 200)
            assert owner._k_scale_float == pytest.approx(k_scale)
            assert owner._v_scale_float == pytest.approx(
                float(value.abs().max().float() / 100)
            )
    assert sharing._k_scale_float == 1.0 and sharing.calculate_kv_scales
    # half a step of e4m3 is a sixteenth of the number, or a 1024th where numbers are small
    stored = owner.kv_cache[0, 2, :6].float() * k_scale
    given = torch.cat(keys).view(6, KV_HEADS, SIZE).float()
    step_sizes = torch.maximum(given.abs() / 16, torch.tensor(k_scale / 1024))
    assert bool(((stored - given).abs() <= step_sizes * (1 + 1e-6)).all())


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_loaded_scales_may_be_one_a_head(backend: str, device: torch.device) -> None:
    config = CacheConfig(cache_dtype="fp8_e5m2", calculate_kv_scales=True)
    (layer,) = make_layers(backend, "m.0", cache_config=config).values()
    layer.to(device)
    k_scale = torch.tensor([2.0, 0.5])
    layer.load_kv_scales(k_scale, 4.0)
    assert layer._k_scale.tolist() == [2.0, 0.5] and layer._k_scale_float is None
    assert layer._v_scale_float == 4.0 and layer._k_scale.device.type == device.type
    assert not layer.calculate_kv_scales
    build = steps_of(layer, device)
    query, key, value = activations(3, device)
    layer(query, key, value, build(3, 0))
    heads = key.view(3, KV_HEADS, SIZE).float() / k_scale[:, None].to(device)
    expected = heads.to(torch.float8_e5m2)
    assert torch.equal(layer.kv_cache[0, 2, :3].float(), expected.float())
    k_scale += 1
    assert layer._k_scale.tolist() == [2.0, 0.5], "the layer keeps numbers of its own"
    layer.load_kv_scales(None, None)
    assert layer._k_scale.tolist() == [2.0, 0.5], "None leaves them as they are"


@pytest.mark.sample(3)
@pytest.mark.parametrize("loaded", [(0.25, 0.5), (0.25, None), (None, 0.5)])
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_a_step_has_the_scales_that_were_loaded_last(
    backend: str, loaded: tuple[float | None, float | None], device: torch.device
) -> None:
    config = CacheConfig(cache_dtype="fp8")
    rows, found = activations(3, device), []
    for steps_before in (1, 0):
        (layer,) = make_layers(backend, "m.0", cache_config=config).values()
        layer.to(device).load_kv_scales(2.0, 2.0)
        build = steps_of(layer, device)
        for _ in range(steps_before):
            layer(*rows, build(3, 0))
        layer.load_kv_scales(*loaded)
        output = layer(*rows, build(3, 0))
        found.append((output, layer.kv_cache[:, 2, :3].view(torch.uint8)))
    for used, fresh in zip(*found, strict=True):
        assert torch.equal(used, fresh)


def test_scales_that_mean_nothing_are_rejected() -> None:
    (layer,) = make_layers("REFERENCE", "m.0").values()
    for scale, words in (
        (torch.ones(3), r"k_scale has shape \[3\]: expected \[\] or \[1\] or \[2\]"),
        (0.0, "k_scale = 0.0: expected a finite number above 0"),
        (torch.tensor([1.0, -1.0]), "k_scale = -1.0: expected a finite number"),
    ):
        with pytest.raises(ValueError, match=words):
            layer.load_kv_scales(scale, None)
    assert layer._k_scale_float == 1.0


def test_layers_share_caches_of_one_dtype_alone() -> None:
    layers = make_layers("REFERENCE", "m.0")
    config = CacheConfig(cache_dtype="fp8")
    with pytest.raises(ValueError, match="kv_cache_dtype = fp8 and shares the cache"):
        Attention(
            HEADS,
            SIZE,
            1.0,
            KV_HEADS,
            cache_config=config,
            prefix="m.1",
            attn_backend="REFERENCE",
            kv_sharing_target_layer_name="m.0",
            static_forward_context=layers,
        )


def test_a_cache_is_what_the_layer_asks_for() -> None:
    (layer,) = make_layers("REFERENCE", "m.0", attention_chunk_size=8).values()
    spec = layer.get_kv_cache_spec(BLOCK, torch.float16)
    assert (
        isinstance(spec, ChunkedLocalAttentionSpec) and spec.attention_chunk_size == 8
    )
    assert layer.impl.attention_chunk_size == 8
    config = CacheConfig(cache_dtype="fp8_e5m2")
    (layer,) = make_layers("REFERENCE", "m.0", cache_config=config).values()
    spec = layer.get_kv_cache_spec(BLOCK, torch.float16)
    assert spec is not None and spec.dtype == torch.float8_e5m2
    assert spec.page_size_bytes == 2 * BLOCK * KV_HEADS * SIZE
    for kind in ("encoder", "encoder_only"):
        (layer,) = make_layers("REFERENCE", "m.0", attn_type=kind).values()
        assert layer.get_kv_cache_spec(BLOCK, torch.float16) is None


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_a_layer_of_cross_attention_is_given_keys_once(
    backend: str, device: torch.device
) -> None:
    """Seven tokens of an encoder, written with the prompt and read by each decode."""
    torch.manual_seed(1)
    (layer,) = make_layers(backend, "m.0", attn_type="encoder_decoder").values()
    build = steps_of(layer, device)
    spec = layer.get_kv_cache_spec(BLOCK, torch.float16)
    assert isinstance(spec, CrossAttentionSpec)
    lens, starts = torch.tensor([7]).int(), torch.tensor([0, 7]).int()
    fields = {
        "encoder_seq_lens": lens.to(device),
        "encoder_seq_lens_cpu": lens,
        "cross_block_table_tensor": torch.tensor([[3]]).int().to(device),
    }
    first = fields | {
        "encoder_query_start_loc": starts.to(device),
        "encoder_query_start_loc_cpu": starts,
        "cross_slot_mapping": torch.arange(48, 55, device=device),
    }
    _, key, value = activations(7, device)
    query, _, _ = activations(3, device)
    outputs = [layer(query, key, value, build(3, 0, **first))]
    written = layer.kv_cache.clone()
    queries = [query]
    for old in range(3, 6):
        query, _, _ = activations(1, device)
        queries.append(query)
        outputs.append(layer(query, None, None, build(1, old, **fields)))
    assert torch.equal(layer.kv_cache, written)
    # every query attends to all seven, so one call computes them
    parts = [
        states.cpu().double().unflatten(1, (-1, SIZE)).transpose(0, 1)
        for states in (torch.cat(queries), key, value)
    ]
    answers = [
        nn.functional.scaled_dot_product_attention(*call, enable_gqa=True)
        for call in (
            parts,
            [part.half() for part in parts],
            [*parts[:2], parts[2].abs()],
        )
    ]
    exact, same, sizes = (answer.transpose(0, 1) for answer in answers)
    found = torch.cat(outputs).cpu().unflatten(1, (-1, SIZE))
    verdict = judge_rows(found, exact, same, torch.float16, sizes)
    assert verdict.ok, verdict


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_layers_of_cross_attention_share_a_cache(
    backend: str, device: torch.device
) -> None:
    """The second one attends to the keys of the first, whatever it is given itself."""
    made = make_layers(backend, "m.0", "m.1", attn_type="encoder_decoder")
    owner, sharing = made.values()
    build = steps_of(owner, device)
    sharing.kv_cache = owner.kv_cache
    lens, starts = torch.tensor([7]).int(), torch.tensor([0, 7]).int()
    metadata = build(
        3,
        0,
        encoder_seq_lens=lens.to(device),
        encoder_seq_lens_cpu=lens,
        encoder_query_start_loc=starts.to(device),
        encoder_query_start_loc_cpu=starts,
        cross_block_table_tensor=torch.tensor([[1]]).int().to(device),
        cross_slot_mapping=torch.arange(16, 23, device=device),
    )
    _, key, value = activations(7, device)
    query, _, _ = activations(3, device)
    expected = owner(query, key, value, {"m.0": metadata})
    written = owner.kv_cache.clone()
    for given in ((None, None), (9 * key, 9 * value)):
        output = sharing(query, *given, {"m.0": metadata})
        assert torch.equal(output, expected) and bool(output.any())
    assert torch.equal(owner.kv_cache, written)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_values_of_another_size_make_an_output_of_that_size(
    backend: str, device: torch.device
) -> None:
    (layer,) = make_layers(backend, "m.0", head_size_v=16).values()
    build = steps_of(layer, device)
    query, key, value = activations(3, device)
    value = value[:, : KV_HEADS * 16]
    output = layer(query, key, value, build(3, 0))
    assert output.shape == (3, HEADS * 16)
    # the first token attends to its own value alone
    own = value[0].view(KV_HEADS, 16).repeat_interleave(HEADS // KV_HEADS, 0)
    assert torch.equal(output[0].view(HEADS, 16), own)


# ---- a backend that records what it is given


class RecordingImpl:
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        self.given = {k: v for k, v in locals().items() if k not in ("self", "extra")}
        self.given |= extra
        self.scale = scale
        self.calls: list[tuple[Any, ...]] = []

    def forward(self, layer: Any, *arguments: Any) -> Tensor:
        self.calls.append(arguments)
        query, output = arguments[0], arguments[5] if len(arguments) > 5 else None
        return 3 * query if output is None else output.copy_(2 * query)


class Recording(load_backend("REFERENCE")):
    name = "RECORDING"
    get_impl_cls = staticmethod(lambda: RecordingImpl)


class WithoutBuffer(Recording):
    accept_output_buffer = False


class Plain(load_backend("REFERENCE")):
    """A backend whose layers take numbers only."""

    name = "PLAIN"
    get_impl_cls = staticmethod(lambda: PlainImpl)


class PlainImpl:
    def __init__(self, num_heads: int, head_size: int, scale: float, kv: int) -> None:
        self.scale = scale


def layer(backend: type[AttentionBackend] = Recording, **options: Any) -> Attention:
    return Attention(2, 4, 0.5, 1, attn_backend=backend, **options)


def test_every_option_reaches_the_implementation() -> None:
    made = layer(
        alibi_slopes=[0.5, 0.25],
        cache_config=CacheConfig(cache_dtype="fp8", sliding_window=512),
        logits_soft_cap=30.0,
        per_layer_sliding_window=0,
        attn_type="encoder_decoder",
        sinks=torch.zeros(2),
    )
    sinks = made.impl.given.pop("sinks")
    assert made.has_sink and sinks.shape == (2,)
    assert made.impl.given == {
        "num_heads": 2,
        "head_size": 4,
        "scale": 0.5,
        "num_kv_heads": 1,
        "alibi_slopes": [0.5, 0.25],
        "sliding_window": 0,
        "kv_cache_dtype": "fp8",
        "logits_soft_cap": 30.0,
        "attn_type": AttentionType.ENCODER_DECODER,
        "kv_sharing_target_layer_name": None,
    }
    config = CacheConfig(sliding_window=512)
    assert layer(cache_config=config).impl.given["sliding_window"] == 512


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("alibi_slopes", {"alibi_slopes": []}),
        ("sliding_window", {"per_layer_sliding_window": 0}),
        ("sliding_window", {"cache_config": CacheConfig(sliding_window=8)}),
        ("kv_cache_dtype", {"cache_config": CacheConfig(cache_dtype="fp8")}),
        ("logits_soft_cap", {"logits_soft_cap": 30.0}),
        ("attn_type", {"attn_type": "encoder_only"}),
        ("sinks", {"sinks": torch.zeros(2)}),
    ],
)
def test_an_option_that_the_implementation_lacks_is_rejected(
    name: str, option: dict[str, Any]
) -> None:
    layers: dict[str, Attention] = {}
    words = f"layer 'm.0': {name} = .* is more than the layers of PLAIN take"
    with pytest.raises(NotImplementedError, match=words):
        layer(Plain, prefix="m.0", static_forward_context=layers, **option)
    assert not layers, "what is rejected is not registered"
    layer(Plain, sinks=None)


def test_a_name_that_is_taken_is_rejected() -> None:
    layers: dict[str, Attention] = {}
    first = layer(static_forward_context=layers)
    assert layers == {"": first}, "the empty name is a name"
    with pytest.raises(ValueError, match="prefix = '' is the name of another layer"):
        layer(static_forward_context=layers)
    assert layers == {"": first}


def test_a_layer_to_share_with_comes_earlier_and_keeps_such_a_cache() -> None:
    """vLLM registered the layer before it rejected, so that its name was taken."""
    layers: dict[str, Attention] = {}

    def share(target: str, **options: Any) -> Attention:
        return layer(
            prefix="m.9",
            kv_sharing_target_layer_name=target,
            static_forward_context=layers,
            **options,
        )

    layer(prefix="m.0", static_forward_context=layers)
    sharing = layer(
        prefix="m.1", kv_sharing_target_layer_name="m.0", static_forward_context=layers
    )
    before = dict(layers)
    for target, words in (
        ("m.9", "shares its cache with itself"),
        ("m.12", "'m.12': expected a layer that comes before it, one of 'm.0', 'm.1'"),
        ("m.1", "which has none of its own: expected 'm.0'"),
    ):
        with pytest.raises(ValueError, match=words):
            share(target)
    with pytest.raises(ValueError, match="attn_type = encoder_only and shares"):
        share("m.0", attn_type="encoder_only")
    assert layers == before
    assert sharing.impl.given["kv_sharing_target_layer_name"] == "m.0"


def test_heads_that_do_not_divide_are_rejected() -> None:
    with pytest.raises(ValueError, match="num_heads = 6 is not a multiple of num_kv"):
        Attention(6, 8, 1.0, 4, attn_backend=Recording)
    with pytest.raises(ValueError, match="num_kv_heads = 0: expected at least 1"):
        Attention(6, 8, 1.0, 0, attn_backend=Recording)
    with pytest.raises(ValueError, match="'sideways' is not a valid AttentionType"):
        layer(attn_type="sideways")


def test_metadata_by_name_is_looked_up() -> None:
    made = layer(prefix="m.0")
    query, key = torch.ones(3, 8), torch.ones(3, 4)
    for metadata in ("META", {"m.0": "META", "other": 1}, None):
        output = made(query, key, key, metadata)
        assert made.impl.calls[-1][4] == (metadata and "META")
        assert output.shape == (3, 8) and bool((output == 2).all())
    with pytest.raises(KeyError, match=r"no entry 'm.0': expected one of 'm.1'"):
        made(query, key, key, {"m.1": "META"})


def test_activations_become_heads_and_the_output_is_zero_before() -> None:
    made = layer()
    made(torch.ones(3, 8), torch.ones(3, 4), torch.ones(3, 4), None)
    query, key, value, kv_cache, _, output = made.impl.calls[0]
    assert query.shape == output.shape == (3, 2, 4)
    assert key.shape == value.shape == (3, 1, 4) and kv_cache.numel() == 0
    flat = layer(use_mla=True)
    result = flat(torch.ones(3, 8), None, None, None, output_shape=(3, 8))
    assert flat.impl.calls[0][0].shape == (3, 8) == result.shape


def test_a_step_without_tokens_gives_an_empty_output() -> None:
    assert layer()(
        torch.ones(0, 8), torch.ones(0, 4), torch.ones(0, 4), None
    ).shape == (
        0,
        8,
    )


def test_a_backend_without_output_buffer_returns_what_it_likes() -> None:
    made = layer(WithoutBuffer)
    result = made(torch.ones(3, 8), torch.ones(3, 4), torch.ones(3, 4), None)
    assert bool((result == 3).all()) and made.impl.calls[0][0].shape == (3, 8)


def test_scales_are_measured_once_and_not_in_a_profiling_run() -> None:
    made = layer(cache_config=CacheConfig(calculate_kv_scales=True))
    query, key = torch.tensor([[1.0, -2.0] * 4]), torch.tensor([[4.0] * 4])
    made(query, key, -10 * key, None)
    assert made.calculate_kv_scales and made._k_scale_float == 1.0
    for factor in (1, 7):
        step = SimpleNamespace(num_actual_tokens=1)
        made(factor * query, factor * key, factor * -2.5 * key, step)
        assert not made.calculate_kv_scales
        found = made._q_scale, made._k_scale, made._v_scale
        assert [scale.item() for scale in found] == pytest.approx([0.01, 0.02, 0.1])
        assert made._v_scale_float == pytest.approx(0.1)


def test_what_is_all_zero_keeps_its_scale() -> None:
    """A scale of 0, as vLLM sets it, turns every later key into an infinity."""
    made = layer(cache_config=CacheConfig(calculate_kv_scales=True))
    made.calc_kv_scales(torch.ones(1), torch.zeros(2), torch.ones(1))
    assert made._k_scale.item() == made._k_scale_float == 1.0
    with pytest.raises(ValueError, match=r"key has shape \[0\]: expected at least one"):
        made.calc_kv_scales(torch.ones(1), torch.ones(0), torch.ones(1))
    with pytest.raises(ValueError, match="value has shape None"):
        made.calc_kv_scales(torch.ones(1), torch.ones(1), None)


def test_a_layer_says_what_it_is() -> None:
    made = layer()
    assert made.get_attn_backend() is Recording and made.backend == "RECORDING"
    words = "head_size=4, num_heads=2, num_kv_heads=1, scale=0.5, backend=RecordingImpl"
    assert made.extra_repr() == words and words in repr(made)
    assert not made.state_dict(), "scales are measured, not stored with the weights"


def test_a_layer_without_a_backend_takes_the_one_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGETWIN_ATTENTION_BACKEND", "REFERENCE")
    assert Attention(2, 8, 1.0).get_attn_backend() is load_backend("REFERENCE")
    monkeypatch.delenv("PAGETWIN_ATTENTION_BACKEND")
    with pytest.raises(ValueError, match="backend = None: expected a name"):
        Attention(2, 8, 1.0)
    named = Attention(2, 8, 1.0, attn_backend="REFERENCE")
    assert named.get_attn_backend() is load_backend("REFERENCE")
