"""Steps of the SGLang plugin in a stand-in, compared with attention by hand."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.fake_sglang import VERSIONS, fake_sglang
from support.sglang_steps import MAX_TOKENS, EngineSteps, Layer

OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, bfloat16": {"heads": 6, "kv_heads": 2, "dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "size of values": {"size": 48, "size_v": 32},
    "pages of 1": {"page_size": 1},
    "pages of 32": {"page_size": 32},
    "heads first": {"heads_first": True},
    "window": {"sliding_window_size": 6},
    "window of 1": {"sliding_window_size": 0},
    "pools": {"has_windows": True, "sliding_window_size": 9},
    "pools, pages of 1": {
        "has_windows": True,
        "sliding_window_size": 9,
        "page_size": 1,
    },
    "sinks": {"sinks": torch.tensor([1.0, -0.5, 2.0, 0.25], dtype=torch.bfloat16)},
    "soft cap": {"logit_cap": 5.0},
    "chunks": {"use_irope": True, "attention_chunk_size": 16},
    "e4m3": {"cache_dtype": E4M3},
    "e5m2, pools": {
        "cache_dtype": E5M2,
        "has_windows": True,
        "sliding_window_size": 9,
    },
}


@pytest.fixture(params=["reference", "optimized"])
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The implementation that the plugin runs."""
    monkeypatch.setenv("PAGETWIN_SGLANG_IMPLEMENTATION", request.param)
    return str(request.param)


@pytest.fixture
def sglang() -> Iterator[str]:
    """The newest interface."""
    with fake_sglang(NEWEST):
        yield NEWEST


def run_steps(steps: EngineSteps) -> float:
    """Return the largest error of a prompt, its second chunk beside a decode, and of decodes."""
    return max(
        steps.step("EXTEND", [21, 3, 1]),
        steps.step("EXTEND", [17, 2, 5]),  # each has a prefix
        steps.step("MIXED", [30, 1, 1]),
        steps.step("DECODE", [1, 1, 1]),
        steps.step("TARGET_VERIFY", [4, 4, 4]),
        steps.step("DECODE", [1, 1]),
    )


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", LAYERS)
def test_prompts_chunks_decodes_and_drafts_are_right(
    name: str, twin: str, sglang: str
) -> None:
    assert run_steps(EngineSteps(**LAYERS[name])) <= 1


@pytest.mark.parametrize("version", VERSIONS)
def test_steps_are_right_in_every_release(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGETWIN_SGLANG_IMPLEMENTATION", "reference")
    with fake_sglang(version):
        steps = EngineSteps(has_windows=True, sliding_window_size=9)
        assert run_steps(steps) <= 1


@pytest.mark.parametrize("name", ["plain", "pools", "sinks", "e4m3"])
def test_metadata_of_a_captured_graph_is_right_with_rows_of_padding(
    name: str, sglang: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGETWIN_SGLANG_IMPLEMENTATION", "optimized")
    steps = EngineSteps(**LAYERS[name])
    for layer_id in range(len(steps.layers)):
        # SGLang's page of padding has zeros
        for buffer in steps.pool.get_kv_buffer(layer_id):
            buffer[:16] = 0
    assert steps.step("EXTEND", [21, 3, 1]) <= 1
    assert steps.step("DECODE", [1, 1, 1], padding=1, graph=True) <= 1
    assert steps.step("TARGET_VERIFY", [3, 3], padding=2, graph=True) <= 1
    step = steps.backend.forward_metadata
    assert step.max_seq_len == MAX_TOKENS
    assert step.seq_lens.tolist()[2:] == [4, 4]
    assert not step.block_table[2:].any()
    with pytest.raises(NotImplementedError, match="EXTEND in a CUDA graph"):
        steps.step("EXTEND", [2, 1], graph=True)


def test_a_layer_may_read_the_cache_of_another_one(twin: str, sglang: str) -> None:
    steps = EngineSteps()
    assert steps.step("EXTEND", [21, 3, 1]) <= 1
    query = torch.randn(25, 4, 32)
    batch = steps.batch("EXTEND", [21, 3, 1])
    layer = Layer(**{**vars(steps.layers[0]), "sliding_window_size": 4})
    before = [buffer.clone() for buffer in steps.pool.get_kv_buffer(0)]
    steps.backend.init_forward_metadata(batch)
    out = steps.backend.forward_extend(query, None, None, layer, batch)
    steps.layers[0] = layer
    assert steps.judge(0, query, [21, 3, 1], out.view(25, 4, 32)) <= 1
    for now, then in zip(steps.pool.get_kv_buffer(0), before, strict=True):
        assert torch.equal(now.nan_to_num(), then.nan_to_num())


def test_an_encoder_attends_in_both_directions(twin: str, sglang: str) -> None:
    from sglang.srt.layers.radix_attention import AttentionType

    kind = AttentionType("encoder_only")
    assert EngineSteps(attn_type=kind).step("EXTEND", [21, 3, 1]) <= 1


def test_a_layer_without_scales_reads_codes_as_they_are(sglang: str) -> None:
    steps = EngineSteps(cache_dtype=E4M3, k_scale=None, v_scale=None)
    layer = steps.layers[0]
    options = steps.backend._options_of(layer, E4M3, None)
    assert (options.k_scale, options.v_scale) == (1.0, 1.0)
    assert steps.backend._options_of(layer, E4M3, None) is options
    layer.k_scale = torch.tensor(2.0)
    assert steps.backend._options_of(layer, E4M3, None).k_scale is layer.k_scale


def test_sinks_of_a_later_call_are_not_lost(sglang: str) -> None:
    steps = EngineSteps()
    layer, sinks = steps.layers[0], torch.ones(4)
    options = steps.backend._options_of
    assert options(layer, torch.float32, None).sinks is None
    assert options(layer, torch.float32, sinks).sinks is not None
    assert options(layer, torch.float32, None).sinks is None


def test_sinks_that_change_keep_the_address_that_graphs_read(sglang: str) -> None:
    steps = EngineSteps()
    sinks = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
    own = steps.backend._options_of(steps.layers[0], torch.float32, sinks).sinks
    sinks += 1
    found = steps.backend._options_of(steps.layers[0], torch.float32, sinks).sinks
    assert found is own and own.tolist() == [2.0, 3.0, 4.0, 5.0]


def test_a_step_without_requests_has_no_metadata(sglang: str) -> None:
    steps = EngineSteps()
    batch = steps.batch("DECODE", [1])
    batch.batch_size = 0
    steps.backend.init_forward_metadata(batch)
    assert steps.backend.forward_metadata is None


@pytest.mark.parametrize(
    "change", [{"tree_topk": 4}, {"ragged_verify_layout": "ragged"}], ids=str
)
def test_drafts_in_a_tree_or_of_several_lengths_are_rejected(
    change: dict[str, Any], sglang: str
) -> None:
    steps = EngineSteps()
    assert steps.step("EXTEND", [21, 3, 1]) <= 1
    batch = steps.batch("TARGET_VERIFY", [2, 2])
    vars(batch.spec_info).update(change)
    with pytest.raises(NotImplementedError, match="--speculative-eagle-topk 1"):
        steps.backend.init_forward_metadata(batch)


def test_options_of_other_backends_are_rejected_by_name(sglang: str) -> None:
    steps = EngineSteps()
    batch = steps.batch("EXTEND", [1])
    steps.backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match="score_mod is given"):
        steps.backend.forward_extend(
            torch.ones(1, 128), None, None, steps.layers[0], batch, score_mod=len
        )
