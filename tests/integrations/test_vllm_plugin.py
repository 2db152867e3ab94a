"""The vLLM plugin in steps of an engine, inside a stand-in for each recorded version of vLLM."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_vllm import VERSIONS, fake_vllm
from support.vllm_steps import (
    BLOCK_SIZE,
    DEVICE,
    MAX_BLOCKS,
    NUM_BLOCKS,
    EngineSteps,
    vllm_config,
)

pytestmark = pytest.mark.long

OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]
MIXED = [(20, 3, 1), (1, 1, 17), (1, 4, 1)]
SLOPES = [0.5, 0.25, 0.125, 0.0625]


@pytest.fixture(params=[OLDEST, NEWEST])
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    """The oldest and the newest interface: both forms of a cache."""
    with fake_vllm(request.param):
        yield request.param


@pytest.mark.parametrize("implementation", ["reference", "optimized"])
@pytest.mark.parametrize("version", VERSIONS)
def test_steps_of_prefills_and_decodes_are_exact_in_the_cache_of_each_version(
    version: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGETWIN_VLLM_IMPLEMENTATION", implementation)
    with fake_vllm(version):
        steps = EngineSteps(version)
        assert max(steps.step(lens) for lens in MIXED) <= 1


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 5},
        {"logits_soft_cap": 2.0},
        {"alibi_slopes": SLOPES},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"sliding_window": 7, "logits_soft_cap": 3.0},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2", "sliding_window": 9},
        {"dtype": torch.float16},
        {"head_size": 72, "kv_heads": 4},
        {"head_size": 256, "kv_heads": 1},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_every_option_of_a_layer_is_exact(version: str, options: Any) -> None:
    steps = EngineSteps(version, **options)
    assert max(steps.step(lens) for lens in MIXED) <= 1


@pytest.mark.parametrize("version", VERSIONS)
def test_the_key_of_a_state_is_stored_before_its_value(version: str) -> None:
    """As vLLM's own backends have it, and what transfers caches between engines."""
    with fake_vllm(version):
        steps = EngineSteps(version)
        key, value = steps.impl._split(steps.cache)
        size = steps.cache.element_size()
        apart = (value.data_ptr() - key.data_ptr()) // size
        halves = BLOCK_SIZE * steps.kv_heads * steps.head_size
        assert key.data_ptr() == steps.cache.data_ptr()
        assert apart == (halves if steps.cache.dim() == 5 else steps.head_size)
        assert key.shape == value.shape == (NUM_BLOCKS, BLOCK_SIZE, 2, 32)


def test_a_cache_of_another_shape_is_an_error(version: str) -> None:
    with pytest.raises(ValueError, match=r"kv_cache has shape \[4, 3, 16\]: expected"):
        EngineSteps(version).impl._split(torch.zeros(4, 3, 16))


def test_drafts_are_verified_in_steps_of_uniform_length(version: str) -> None:
    steps = EngineSteps(version)
    assert steps.step((9, 18, 2)) <= 1
    assert steps.step((3, 3, 3)) <= 1


@pytest.mark.parametrize("causal", [False, torch.tensor([True, False, True])], ids=str)
def test_a_step_that_is_not_causal_is_exact(version: str, causal: Any) -> None:
    steps = EngineSteps(version)
    assert steps.step((9, 18, 2)) <= 1
    assert steps.step((3, 2, 1), causal) <= 1


def test_a_layer_that_shares_a_cache_reads_the_keys_of_its_owner(version: str) -> None:
    first = EngineSteps(version)
    second = EngineSteps(version, source=first)
    for lens in MIXED:
        assert first.step(lens) <= 1
        assert second.step(lens) <= 1


def test_an_output_can_be_quantised(version: str) -> None:
    steps = EngineSteps(version)
    assert steps.step((20, 3, 1), output_scale=torch.tensor(0.02)) <= 1


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])], ids=str)
def test_a_shared_prefix_is_read_once(
    version: str, sinks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = EngineSteps(version, sinks=sinks)
    steps.step((20, 20, 20))
    for req in (1, 2):  # the first block of all sequences becomes that of the first
        steps.block_table[req, 0] = steps.block_table[0, 0]
        for rows in (steps.keys, steps.values):
            rows[req] = torch.cat([rows[0][:BLOCK_SIZE], rows[req][BLOCK_SIZE:]])
    called = []
    run = steps.impl.run
    monkeypatch.setitem(
        run.operations,
        "cascade_attention",
        lambda *given, _own=run.cascade_attention, **named: (
            called.append(given[8]),
            _own(*given, **named),
        )[1],
    )
    assert steps.step((1, 2, 1), prefix=BLOCK_SIZE) <= 1
    assert called == [BLOCK_SIZE]


def test_a_cascade_is_chosen_only_for_layers_that_can_run_it(version: str) -> None:
    shared = (512, [1] * 16, 8, 2, False, False, False, 4, 1)
    assert EngineSteps(version).builder.use_cascade_attention(*shared)
    for options in ({"sliding_window": 9}, {"attn_type": "encoder_decoder"}):
        assert not EngineSteps(version, **options).builder.use_cascade_attention(
            *shared
        )


def test_an_encoder_attends_to_its_own_step_in_both_directions(version: str) -> None:
    for options in ({}, {"sliding_window": 4}, {"kv_cache_dtype": "fp8"}):
        steps = EngineSteps(version, attn_type="encoder_only", **options)
        assert steps.step((9, 20, 1), causal=False) <= 1
        if "kv_cache_dtype" not in options:
            assert bool(steps.cache.isnan().all()), "an encoder has no cache"


def test_cross_attention_writes_the_encoders_keys_once_and_reads_them_later(
    version: str,
) -> None:
    """As vLLM's CrossAttentionBuilder: encoder lengths, and slots put into the metadata."""
    steps = EngineSteps(version, attn_type="encoder_decoder")
    encoder_lens = (20, 5, 33)
    steps.keys = [steps._rows(2, count) for count in encoder_lens]
    steps.values = [steps._rows(2, count) for count in encoder_lens]
    slots = torch.cat([steps.slots(r, 0, n) for r, n in enumerate(encoder_lens)])
    slots = slots.to(DEVICE)
    for number, lens in enumerate([(4, 1, 2), (1, 1, 1)]):
        common = steps.common((0, 0, 0), False, 0)
        starts = torch.tensor([0, *lens]).cumsum(0).to(DEVICE, torch.int32)
        common.query_start_loc, common.num_actual_tokens = starts, sum(lens)
        common.max_query_len, common.max_seq_len = max(lens), max(encoder_lens)
        metadata = steps.builder.build(0, common)
        metadata.slot_mapping = slots if not number else slots[:0]
        key, value = torch.cat(steps.keys), torch.cat(steps.values)
        if not number:
            steps.impl.do_kv_cache_update(
                steps.layer, key, value, steps.cache, metadata.slot_mapping
            )
        query = steps._rows(4, sum(lens))
        out = torch.full_like(query, torch.nan)
        steps.impl.forward(steps.layer, query, None, None, steps.cache, metadata, out)
        assert steps.judge(query, lens, False, out) <= 1


def test_a_step_without_an_encoder_has_a_bound_that_kernels_take(version: str) -> None:
    steps = EngineSteps(version, attn_type="encoder_decoder")
    common = steps.common((0, 0, 0), False, 0)
    common.max_seq_len = 0
    assert steps.builder.build(0, common).max_seq_len == 1


def test_metadata_are_views_of_vllms_buffers_so_that_a_graph_reads_each_replay(
    version: str,
) -> None:
    steps = EngineSteps(version)
    common = steps.common((1, 1, 1), True, 0)
    built = steps.builder.build(0, common)
    pairs = [
        (built.query_start_loc, common.query_start_loc),
        (built.seq_lens, common.seq_lens),
        (built.block_table, common.block_table_tensor),
        (built.slot_mapping, common.slot_mapping),
    ]
    assert all(mine.data_ptr() == theirs.data_ptr() for mine, theirs in pairs)
    assert len(built.seq_lens) == len(built.block_table) == 3
    other = steps.builder.update_block_table(
        built, common.block_table_tensor + 1, common.slot_mapping + 1
    )
    assert bool((other.block_table == built.block_table + 1).all())
    assert len(other.block_table) == 3
    assert other.seq_lens is built.seq_lens


def test_a_dummy_run_writes_zeros_and_no_slot(version: str) -> None:
    steps = EngineSteps(version)
    query = steps._rows(4, 3)
    out = torch.full(query.shape, torch.nan)
    empty = torch.empty(0)
    steps.impl.do_kv_cache_update(steps.layer, query, query, empty, torch.zeros(3))
    steps.impl.forward(steps.layer, query, query, query, empty, None, out)
    assert bool((out == 0).all())
    assert bool(steps.cache.isnan().all())


def test_two_engines_in_one_process_do_not_mix(version: str) -> None:
    one, other = EngineSteps(version), EngineSteps(version, head_size=64, heads=8)
    for lens in MIXED:
        assert one.step(lens) <= 1
        assert other.step(lens) <= 1


@pytest.mark.parametrize("output_scale", [None, torch.tensor(0.02)], ids=str)
def test_sinks_follow_new_weights_in_place(version: str, output_scale: Any) -> None:
    """Those of a model in another dtype too, of which the layer has a float32 copy."""
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16)
    steps = EngineSteps(version, sinks=sinks)
    assert steps.step((5, 1, 2), output_scale=output_scale) <= 1
    before = steps.impl.own.options(torch.device(DEVICE)).sinks.data_ptr()
    sinks += 3.0
    steps.impl.process_weights_after_loading(torch.float32)
    assert steps.step((1, 1, 1), output_scale=output_scale) <= 1
    assert steps.impl.own.options(torch.device(DEVICE)).sinks.data_ptr() == before


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_kernels_of_the_chip_read_both_forms_of_a_cache(
    version: str, kv_heads: int
) -> None:
    """Keys and values of a state beside each other, and an axis of one head with any stride."""
    steps = EngineSteps(
        version,
        heads=16,
        kv_heads=kv_heads,
        head_size=128,
        dtype=torch.bfloat16,
        device="cuda",
    )
    assert max(steps.step(lens) for lens in ((70, 3, 1), (1, 1, 60), (1, 1, 1))) <= 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_engines_on_two_streams_do_not_mix(version: str) -> None:
    """Each stream has a workspace of its own, so kernels may run at the same time."""
    engines = [
        EngineSteps(version, dtype=torch.bfloat16, head_size=size, device="cuda")
        for size in (64, 128)
    ]
    streams = [torch.cuda.Stream() for _ in engines]
    for lens in MIXED * 4:
        errors = []
        for engine, stream in zip(engines, streams, strict=True):
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                errors.append(engine.step(lens))
        assert max(errors) <= 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_reads_the_buffers_of_each_replay(version: str) -> None:
    steps = EngineSteps(version, dtype=torch.bfloat16, head_size=64, device="cuda")
    assert steps.step((20, 33, 7), padding=0) <= 1
    query = steps._rows(4, 3)
    out = torch.empty_like(query)
    common = steps.common((1, 1, 1), True, 0)
    # as the builder of vLLM does for a capture
    metadata = steps.builder.build(0, common)
    calls = (steps.layer, query, None, None, steps.cache, metadata, out)
    steps.impl.forward(*calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps.impl.forward(*calls)
    for lens in ((20, 33, 7), (4, 33, 1)):
        # the first keys of a sequence are a sequence too
        rows = [list(states) for states in (steps.keys, steps.values)]
        steps.keys, steps.values = (
            [part[:n] for part, n in zip(row, lens, strict=True)] for row in rows
        )
        common.seq_lens[:3] = torch.tensor(lens)
        query.copy_(steps._rows(4, 3))
        graph.replay()
        assert steps.judge(query, (1, 1, 1), True, out) <= 1


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("version", VERSIONS)
def test_latent_decodes_are_exact(version: str, fp8: bool) -> None:
    """Two decodes of other lengths, as speculative decoding has them, and a prefill after them.

    An FP8 cache is written and read once more after new weights were loaded.
    """
    with fake_vllm(version, use_mla=True):
        assert latent_step(fp8) <= 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_latent_decodes_of_common_sizes_are_exact(dtype: torch.dtype) -> None:
    with fake_vllm(NEWEST, use_mla=True):
        assert latent_step(False, 512, 64, dtype, "cuda") <= 1


def latent_step(
    fp8: bool,
    rank: int = 32,
    rope: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
) -> float:
    """Run a step of latent attention twice, and return the larger error divided by its budget."""
    from pagetwin.conformance.oracles.brute_force import (
        OracleRequest,
        attend_by_hand,
        judge_out,
        quantise_by_hand,
    )
    from pagetwin.integrations.vllm.latent import PagetwinLatentImpl

    heads, scale = 16, 0.2
    sizes = dict(q_lora_rank=None, kv_lora_rank=rank, qk_nope_head_dim=24)
    sizes |= dict(qk_rope_head_dim=rope, qk_head_dim=40, v_head_dim=24, kv_b_proj=None)
    name = "fp8" if fp8 else "auto"
    impl = PagetwinLatentImpl(
        heads, rank + rope, scale, 1, None, None, name, None, "decoder", None, **sizes
    )
    impl.scale = scale
    random = torch.Generator().manual_seed(2)
    lens, query_lens = [20, 33, 7], [2, 1]
    table = torch.randperm(NUM_BLOCKS, generator=random)[: 3 * MAX_BLOCKS].view(3, -1)
    latents = [
        torch.randn(count, rank + rope, generator=random).to(dtype) for count in lens
    ]
    slots = [
        table[req, torch.arange(count) // BLOCK_SIZE] * BLOCK_SIZE
        + torch.arange(count) % BLOCK_SIZE
        for req, count in enumerate(lens)
    ]
    shape = (NUM_BLOCKS, BLOCK_SIZE, rank + rope)
    poison = (0x7F, torch.uint8) if fp8 else (torch.nan, dtype)
    cache = torch.full(shape, poison[0], dtype=poison[1], device=device)
    new = torch.cat([*latents, torch.zeros(1, rank + rope, dtype=dtype)]).to(device)
    query = torch.randn(3, heads, rank + rope, generator=random).to(dtype)
    metadata = SimpleNamespace(
        query_start_loc=torch.tensor([0, 2, 3, 10], dtype=torch.int32, device=device),
        max_seq_len=MAX_BLOCKS * BLOCK_SIZE,
        decode=SimpleNamespace(
            block_table=table[:2].to(device, torch.int32),
            seq_lens=torch.tensor(lens[:2], dtype=torch.int32, device=device),
            max_query_len=2,
        ),
    )
    view = cache.view(torch.float8_e4m3fn) if fp8 else cache
    parts = tuple(part.to(device) for part in query.split([rank, rope], dim=2))
    slot_mapping = torch.cat([*slots, torch.tensor([-1])]).to(device)
    layer, errors = SimpleNamespace(), []
    # the second scale is that of new weights
    for number in (0.5, 0.25):
        layer._k_scale = torch.tensor(number, device=device)
        impl.do_kv_cache_update(
            new[:, :rank],
            new[:, None, rank:],
            cache,
            slot_mapping,
            name,
            layer._k_scale,
        )
        out, lse = impl.forward_mqa(parts, view, metadata, layer)
        assert lse is None
        stored, options = latents, {"causal": True, "scale": scale}
        if fp8:
            stored = [
                quantise_by_hand(x[:, None], number, torch.float8_e4m3fn)[:, 0]
                for x in latents
            ]
            options |= {"k_scale": number, "v_scale": number}
        requests = [
            OracleRequest(part, stored[req][:, None], stored[req][:, None, :rank])
            for req, part in enumerate(query.split(query_lens))
        ]
        answer = attend_by_hand(requests, options, 3)
        errors.append(judge_out(out, answer, answer.out.to(dtype), dtype).worst)
    return max(errors)


ON_HOPPER: dict[str, Any] = {
    "cache_dtype": "auto",
    "ranks": 1,
    "major": 9,
    "name": "optimized",
    "width": 576,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 128),
        ({"cache_dtype": "fp8"}, 1),
        ({"ranks": 2}, 1),
        ({"major": 8}, 1),
        ({"major": 10}, 1),
        ({"name": "reference"}, 1),
        ({"width": 288}, 1),
    ],
    ids=str,
)
def test_few_new_tokens_are_a_decode_where_the_kernel_of_the_chip_computes_them(
    changes: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ON_HOPPER | changes
    monkeypatch.setenv("PAGETWIN_VLLM_IMPLEMENTATION", case["name"])
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: (case["major"], 0)
    )
    layer = SimpleNamespace(impl=SimpleNamespace(bounds=None, engine_layers=()))
    config = vllm_config({"layer": layer}, drafts=3)
    config.cache_config = SimpleNamespace(cache_dtype=case["cache_dtype"])
    config.parallel_config = SimpleNamespace(decode_context_parallel_size=case["ranks"])
    with fake_vllm(NEWEST, use_mla=True):
        from pagetwin.integrations.vllm.latent_builder import PagetwinLatentBuilder

        for device, of_device in (("cuda", expected), ("cpu", 1)):
            spec = SimpleNamespace(head_size=case["width"])
            builder = PagetwinLatentBuilder(
                spec, ["layer"], config, torch.device(device)
            )
            assert builder.reorder_batch_threshold == of_device
            # drafts are decodes too
            assert layer.impl.bounds.decode_query_len == max(of_device, 4)


@pytest.mark.parametrize("version", [VERSIONS[0], NEWEST])
def test_the_bound_of_a_latent_decode_is_that_of_the_decodes_of_its_step(
    version: str,
) -> None:
    """A prefill of the same step has more new tokens, and requests of a graph may have none."""
    with fake_vllm(version, use_mla=True):
        from pagetwin.integrations.vllm.latent_builder import PagetwinLatentBuilder

        module = sys.modules["vllm.model_executor.layers.attention.mla_attention"]
        layer = SimpleNamespace(impl=SimpleNamespace(bounds=None, engine_layers=()))
        builder = PagetwinLatentBuilder(
            None, ["layer"], vllm_config({"layer": layer}), torch.device("cpu")
        )
        for lens, decodes, expected in (
            ((1, 1, 70, 3, 500), 4, 70),
            ((1, 1, 900), 2, 1),
            ((0, 0), 2, 1),
            ((900,), 0, None),
        ):
            made = SimpleNamespace(
                num_decodes=decodes,
                decode=SimpleNamespace(max_query_len=None) if decodes else None,
            )
            module.MLACommonMetadataBuilder.build = lambda *args, made=made: made
            starts = torch.tensor([0, *lens]).cumsum(0).int()
            common = SimpleNamespace(
                query_start_loc_cpu=starts, max_query_len=max(lens)
            )
            found = builder.build(0, common)
            assert found is made
            assert (found.decode and found.decode.max_query_len) == expected
