"""Sparse attention on a GPU: one captured graph selects, converts and attends for any lengths."""

from typing import Any

import pytest
import torch
from pagetwin.conformance.laws.sparse_slots import arguments_for_slots
from pagetwin.optimized.dispatch.dispatch import PIPELINE
from pagetwin.optimized.kernels.sm90.latent.plan import LatentDecodePlan
from pagetwin.optimized.runtime.launcher import INTERPRETED
from support.sm90_calls import needs_hopper
from support.twins import Twin
from torch import Tensor


@pytest.mark.cuda
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_captured_graph_selects_and_attends_for_other_lengths(
    dtype: torch.dtype,
) -> None:
    twin, device = Twin("optimized", enforce=False), torch.device("cuda")
    reqs, block_size, topk = 4, 64, 96
    table = torch.randperm(reqs * 8, device=device).int().view(reqs, 8)
    index_cache = torch.zeros(
        reqs * 8, block_size, 132, dtype=torch.uint8, device=device
    )
    slots = torch.arange(reqs * 8 * block_size, device=device)
    twin.indexer_k_quant_and_cache(
        torch.randn(len(slots), 128, device=device, dtype=dtype), index_cache, slots
    )
    latents = torch.randn(reqs * 8, block_size, 1, 576, device=device, dtype=dtype)
    index_query = torch.randn(reqs, 64, 128, device=device, dtype=dtype)
    weights = torch.randn(reqs, 64, device=device)
    query = torch.randn(reqs, 16, 576, device=device, dtype=dtype)
    starts = torch.arange(reqs + 1, device=device, dtype=torch.int32)
    lens = torch.tensor([1, 95, 97, 512], device=device, dtype=torch.int32)

    def step() -> tuple[Tensor, Tensor]:
        scores = twin.index_scores(
            index_query, weights, index_cache, table, starts, lens, 512
        )
        positions = twin.select_keys(scores, topk)
        named, _ = twin.convert_req_index_to_global_index(
            starts[:-1], table, positions, block_size
        )
        out = twin.sparse_attention(query, latents, latents[..., :512], named)
        return positions, out

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for other in ([512, 3, 96, 200], [0, 64, 65, 1]):
        lens.copy_(torch.tensor(other))
        graph.replay()
        torch.cuda.synchronize()
        for found, right in zip(captured, step(), strict=True):
            assert torch.equal(found, right)


@pytest.mark.cuda
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_a_captured_graph_finds_slots_for_other_lengths() -> None:
    twin, device = Twin("optimized", enforce=False), torch.device("cuda")
    calls = arguments_for_slots(device)
    lens = torch.tensor([4], device=device, dtype=torch.int32)

    def step() -> list[Tensor]:
        found = []
        for name, given in calls.items():
            result = getattr(twin, name)(**given | {"seq_lens": lens})
            found.extend(result if isinstance(result, tuple) else [result])
        table = calls["compute_swa_indices_and_lens"]["block_table"]
        return [*found, *twin.prepare_uniform_decode(lens, table, 2)]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for other in (3, 2, 0, 4):
        lens.fill_(other)
        graph.replay()
        torch.cuda.synchronize()
        for found, right in zip(captured, step(), strict=True):
            assert torch.equal(found, right)


@needs_hopper
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_latents_of_named_slots_are_read_in_place_by_the_hopper_kernel(
    dtype: torch.dtype, heads: int, reference: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,048 of 32,768 slots, the others NaN; -1 anywhere, slots twice, rows without slots."""
    launched = []
    launch = LatentDecodePlan.launch

    def count(self: LatentDecodePlan, call: Any, *task: Any) -> None:
        launched.append(self.is_copied)
        launch(self, call, *task)

    monkeypatch.setattr(LatentDecodePlan, "launch", count)
    PIPELINE.plans.clear()  # a call that was repeated would not be planned
    twin = Twin("optimized", enforce=False)
    torch.manual_seed(heads)
    for tokens in (1, 7, 300):
        cache = torch.full((512, 64, 1, 576), torch.nan, dtype=dtype, device="cuda")
        slots = torch.randint(32768, (tokens, 2048), device="cuda", dtype=torch.int32)
        slots[torch.rand(slots.shape, device="cuda") < 0.1] = -1
        slots[-1, 64:] = -1
        slots[0, :100] = slots[0, 100:200]
        if tokens > 1:
            slots[1] = -1
        named = slots[slots >= 0].unique().long()
        cache.flatten(0, 1)[named] = torch.randn(
            len(named), 1, 576, device="cuda", dtype=dtype
        )
        query = torch.randn(tokens, heads, 576, device="cuda", dtype=dtype)
        given = (query, cache, cache[..., :512], slots)
        lse, right_lse = torch.full((2, heads, tokens), torch.nan, device="cuda")
        out = twin.sparse_attention(*given, scale=0.05, lse=lse)
        some = slice(0, 7)
        right = reference.sparse_attention(
            query[some], *given[1:3], slots[some], scale=0.05, lse=right_lse[:, some]
        )
        torch.testing.assert_close(out[some], right, atol=0.02, rtol=0.02)
        torch.testing.assert_close(
            lse[:, some], right_lse[:, some], atol=1e-3, rtol=1e-3
        )
        assert bool(out.isfinite().all())
        twin.sparse_attention(*given, scale=0.05)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = twin.sparse_attention(*given, scale=0.05)
        again.fill_(torch.nan)
        slots.copy_(slots.flip(0))
        query.copy_(query.flip(0))
        graph.replay()
        torch.testing.assert_close(again, out.flip(0), atol=0.02, rtol=0.02)
    assert launched and all(launched)
    PIPELINE.plans.clear()
