"""Sparse latent attention of the vLLM plugin, inside a stand-in for each recorded version."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.integrations.vllm.warm_up import StepBounds
from support.fake_vllm import VERSIONS, fake_vllm
from support.sparse_steps import (
    BLOCK_SIZE,
    HEADS,
    MAX_TOKENS,
    STALE,
    TOPK,
    Choice,
    SparseSteps,
    make_layer,
)

OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]
RECORDS = {"rank": 512, "rope": 64}
STEPS: list[tuple[int, ...]] = [(30, 3, 1), (1, 1, 1), (3, 1, 2), (20, 26, 1), (1, 2)]
"""Prompts, decodes, drafts, chunks of prompts beside a decode, and requests that have left."""


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference runs, unless a test says otherwise: the laws compare the twins."""
    monkeypatch.setenv("PAGETWIN_VLLM_IMPLEMENTATION", "reference")


@pytest.fixture
def optimized(reference: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGETWIN_VLLM_IMPLEMENTATION", "optimized")


@pytest.fixture(params=[OLDEST, NEWEST])
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    with fake_vllm(request.param, use_mla=True, use_sparse=True):
        yield request.param


@pytest.mark.parametrize("name", VERSIONS)
def test_steps_of_prompts_decodes_and_drafts_are_exact_in_each_version(
    name: str,
) -> None:
    """Prompts are shorter and longer than the number of selected keys."""
    with fake_vllm(name, use_mla=True, use_sparse=True):
        steps = SparseSteps(name)
        assert max(steps.step(lens) for lens in STEPS) <= 1


@pytest.mark.extended
def test_the_optimized_twin_is_exact_in_the_same_steps(optimized: None) -> None:
    with fake_vllm(NEWEST, use_mla=True, use_sparse=True):
        steps = SparseSteps(NEWEST)
        assert max(steps.step(lens) for lens in STEPS) <= 1


FORMATS: list[tuple[str, torch.dtype, dict[str, int]]] = [
    ("auto", torch.float16, {}),
    ("fp8", torch.float32, {}),
    ("fp8_e4m3", torch.float16, {"gap": 48}),
    ("fp8_ds_mla", torch.float16, RECORDS),
    ("fp8_ds_mla", torch.float32, RECORDS | {"gap": 656}),
    ("nvfp4_ds_mla", torch.float32, RECORDS),
]


@pytest.mark.parametrize(("kv_cache_dtype", "dtype", "sizes"), FORMATS)
def test_caches_of_each_format_are_written_and_read(
    version: str, kv_cache_dtype: str, dtype: torch.dtype, sizes: dict[str, int]
) -> None:
    steps = SparseSteps(version, kv_cache_dtype, dtype, **sizes)
    assert max(steps.step(lens) for lens in STEPS[:3]) <= 1


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kv_cache_dtype", "dtype", "sizes"), FORMATS)
def test_the_optimized_twin_takes_caches_of_each_format(
    optimized: None, kv_cache_dtype: str, dtype: torch.dtype, sizes: dict[str, int]
) -> None:
    with fake_vllm(NEWEST, use_mla=True, use_sparse=True):
        steps = SparseSteps(NEWEST, kv_cache_dtype, dtype, **sizes)
        assert max(steps.step(lens) for lens in ((9, 30), (1, 2))) <= 1


@pytest.mark.parametrize(
    "choice",
    [
        Choice(is_first=False),
        Choice(repeats=True),
        Choice(repeats=True, is_first=False, past=True),
    ],
    ids=str,
)
def test_rows_may_have_gaps_duplicates_and_positions_past_the_table(
    version: str, choice: Choice
) -> None:
    """A position that is named twice is two keys, and one past the table is none."""
    steps = SparseSteps(version)
    assert max(steps.step(lens, choice) for lens in STEPS[:3]) <= 1


def test_a_prefix_hit_reads_the_blocks_of_the_request_that_wrote_them(
    version: str,
) -> None:
    steps = SparseSteps(version)
    assert steps.step((40,)) <= 1
    steps.hit_prefix(0, 1, 2)
    assert steps.step((1, 9)) <= 1
    assert steps.step((1, 1)) <= 1


def test_padding_selects_nothing_and_changes_no_token(version: str) -> None:
    """A captured graph has more rows and more requests than its step, and rows of earlier steps."""
    steps = SparseSteps(version)
    assert steps.step((5, 2), padding=3, spare_reqs=2) <= 1
    assert steps.step((1, 1), padding=2, spare_reqs=1, in_parts=False) <= 1
    assert steps.buffer[2:].eq(STALE).all()


def test_a_graph_reads_the_requests_of_each_replay(version: str) -> None:
    """The host computes nothing per token, and the tensors of a capture get later numbers."""
    steps = SparseSteps(version)
    steps.step((5, 2))
    steps.grow((1, 1))
    kept = steps.builder.build(0, steps.common((1, 1), 0, 0)).req_id_per_token
    assert kept.tolist() == [0, 1]
    steps.grow((2,))
    later = steps.builder.build(0, steps.common((2,), 0, 0))
    assert later.req_id_per_token.data_ptr() == kept.data_ptr()
    assert kept.tolist() == [0, 0]


def test_a_layer_reads_the_buffer_that_its_indexer_has_now(version: str) -> None:
    """vLLM gives the indexer of a draft model the buffer of the target after the layer is made."""
    steps = SparseSteps(version)
    impl, other = steps.impl, torch.zeros(2, TOPK, dtype=torch.int32)
    assert impl.topk_indices_buffer is steps.buffer
    impl.indexer.topk_indices_buffer = other
    assert impl.topk_indices_buffer is other
    impl.topk_indices_buffer = steps.buffer
    assert impl.topk_indices_buffer is steps.buffer
    assert SparseSteps(version, has_indexer=False).step((5, 30, 1)) <= 1


@pytest.mark.parametrize("version", VERSIONS)
def test_a_model_with_an_indexer_gets_the_backend_for_it(version: str) -> None:
    for sparse, name in ((True, "PagetwinSparseBackend"), (False, "Pagetwin")):
        with fake_vllm(version, use_mla=True, use_sparse=sparse):
            from pagetwin.integrations.vllm.plugin import choose_backend

            backend = choose_backend()
            assert backend.__name__.startswith(name)
            assert backend.is_sparse() == sparse
            assert choose_backend("PAGETWIN").get_name() == "PAGETWIN"
    with fake_vllm(version, use_sparse=True):
        from pagetwin.integrations.vllm.plugin import choose_backend

        assert choose_backend().__name__ == "PagetwinBackend"


def why_not(backend: Any, **changes: Any) -> str | None:
    layer: dict[str, Any] = dict(
        head_size=576,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        block_size=64,
        use_mla=True,
        has_sink=False,
        use_sparse=True,
        use_mm_prefix=False,
        device_capability=SimpleNamespace(major=9, minor=0),
    )
    return backend.supports_combination(*(layer | changes).values())


def test_what_a_sparse_layer_may_have(version: str) -> None:
    from pagetwin.integrations.vllm.plugin import choose_backend

    backend = choose_backend()
    for name in backend.supported_kv_cache_dtypes:
        dtype = torch.float16 if name == "float16" else torch.bfloat16
        assert why_not(backend, kv_cache_dtype=name, dtype=dtype) is None, name
    assert why_not(backend, head_size=512) is None
    assert backend.supports_head_size(512) and not backend.supports_batch_invariance()
    for changes, reason in (
        ({"use_sparse": False}, "use_sparse = False: expected sparse layers alone"),
        (
            {"kv_cache_dtype": "fp8_ds_mla", "head_size": 512},
            "head_size = 512: expected 576, the elements of a record of fp8_ds_mla",
        ),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype = nvfp4: expected auto, float16"),
    ):
        said = why_not(backend, **changes)
        assert said is not None and reason in said and ". " not in said


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"alibi_slopes": [0.5]}, "alibi_slopes = .*: expected None for sparse latent"),
        ({"sliding_window": 8}, "sliding_window = 8: expected None for sparse latent"),
        ({"logits_soft_cap": 2.0}, "logits_soft_cap = 2.0: expected None"),
        ({"attn_type": "encoder"}, "attn_type = encoder: expected decoder"),
    ],
    ids=str,
)
def test_a_layer_with_options_is_rejected(
    version: str, given: dict[str, Any], reason: str
) -> None:
    from pagetwin.integrations.vllm.plugin import choose_backend

    sizes = dict(kv_lora_rank=32, topk_indices_buffer=torch.zeros(4, TOPK))
    plain: dict[str, Any] = dict(
        num_heads=HEADS, head_size=48, scale=1.0, num_kv_heads=1, alibi_slopes=None,
        sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None,
        attn_type="decoder", kv_sharing_target_layer_name=None,
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match=reason):
        choose_backend().get_impl_cls()(**plain | given | sizes)


def test_ranks_and_caches_of_the_host_are_rejected(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagetwin.integrations.vllm.plugin import choose_backend

    backend = choose_backend()
    buffer = torch.zeros(4, TOPK, dtype=torch.int32)
    for name in ("pcp_world_size", "dcp_world_size"):
        on_ranks = type("OnTwoRanks", (backend.get_impl_cls(),), {name: 2})
        ranked = SimpleNamespace(get_impl_cls=lambda found=on_ranks: found)
        with pytest.raises(NotImplementedError, match=f"{name} = 2: expected 1"):
            make_layer(ranked, "auto", 32, 16, topk_indices_buffer=buffer)
    with pytest.raises(ValueError, match="expected one of them, which has the pos"):
        make_layer(backend, "auto", 32, 16)
    config = sys.modules["vllm.config"].get_current_vllm_config_or_none()  # type: ignore[attr-defined]
    config.attention_config = SimpleNamespace(hisparse_config=object())
    with pytest.raises(NotImplementedError, match="hisparse_config is given: expected"):
        make_layer(backend, "auto", 32, 16, topk_indices_buffer=buffer)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "sizes"),
    [("auto", {"gap": 48}), ("fp8", {}), ("fp8_ds_mla", RECORDS)],
)
def test_the_first_run_that_has_a_cache_warms_up(
    optimized: None,
    kv_cache_dtype: str,
    sizes: dict[str, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a GPU. Here the warm-up of a layer is called, with the caches and options of its calls."""
    with fake_vllm(NEWEST, use_mla=True, use_sparse=True):
        from pagetwin.integrations.vllm.sparse_warm_up import warm_up_sparse

        steps = SparseSteps(NEWEST, kv_cache_dtype, torch.float16, **sizes)
        impl = steps.impl
        impl.bounds = bounds = StepBounds(3, MAX_TOKENS, 5 * BLOCK_SIZE)
        calls: list[Any] = []
        module = sys.modules[type(impl).__module__]
        module.warm_up_sparse = lambda *given: calls.append(given)  # type: ignore[attr-defined]
        on_gpu = SimpleNamespace(is_cuda=True, numel=lambda: 0)
        query = steps._rows(1, HEADS, steps.rank + steps.rope)
        # a profiling run, whose cache is not allocated
        impl._warm_up(on_gpu, on_gpu, query, impl._options_of(steps.layer))
        assert impl.bounds is bounds and not calls
        assert steps.step((2,)) <= 1
        assert impl.bounds is None and impl.engine_layers == () and not calls
        cache = steps.cache[:, :, None]
        if kv_cache_dtype == "fp8":
            cache = cache.view(torch.float8_e4m3fn)
        value = cache if "mla" in kv_cache_dtype else cache[..., : steps.rank]
        options = impl._options_of(steps.layer)
        with caplog.at_level("INFO"):
            warm_up_sparse(
                impl.run, (cache, value), query, (4, TOPK), 0.1, options, bounds
            )
        if kv_cache_dtype != "fp8_ds_mla":
            assert "kernels of layers with 4 query heads" in caplog.text


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
def test_a_captured_step_reads_the_selection_of_each_replay(
    optimized: None, version: str, kv_cache_dtype: str
) -> None:
    sizes = dict(rank=512, rope=64)
    steps = SparseSteps(version, kv_cache_dtype, torch.bfloat16, device="cuda", **sizes)
    assert steps.step((30, 33, 7)) <= 1
    query = steps._rows(3, HEADS, 576)
    new = steps.grow((1, 1, 1))
    common = steps.common((1, 1, 1), 0, 0)
    steps.select((1, 1, 1), Choice())
    metadata = steps.builder.build(0, common)
    steps.write(new, common)
    steps.attend(query, metadata)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = steps.attend(query, metadata)
    for _ in range(3):
        new = steps.grow((1, 1, 1))
        later = steps.common((1, 1, 1), 0, 0)
        common.seq_lens.copy_(later.seq_lens)
        steps.write(new, later)
        rows = steps.select((1, 1, 1), Choice())
        steps.builder.build(0, common)
        query.copy_(steps._rows(3, HEADS, 576))
        graph.replay()
        torch.cuda.synchronize()
        assert steps.judge(query, (1, 1, 1), rows, out) <= 1
