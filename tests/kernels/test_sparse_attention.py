"""Sparse attention on a GPU: one captured graph selects, converts and attends for any lengths."""

import pytest
import torch
from pagetwin.conformance.laws.sparse_slots import arguments_for_slots
from pagetwin.optimized.runtime.launcher import INTERPRETED
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
