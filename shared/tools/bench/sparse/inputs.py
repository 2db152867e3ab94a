"""Inputs of sparse attention, of the indexer's scores and of the selection of the largest ones."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from ....contract.indexer_cache import SCALE_BYTES, split_indexer_cache
from ..inputs import Inputs, draw_inputs
from ..workloads import Workload
from .costs import count_selected, visible_keys

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class SparseInputs(Inputs):
    """The tensors of one workload of kind "sparse".

    Args:
        slots: [tokens, selected] int32 cache slots of each token: distinct visible keys, in random
            order. -1 after the last one, if fewer are visible.
    """

    slots: Tensor = field(kw_only=True)

    @cached_property
    def paged(self) -> Inputs:
        """The same batch as paged attention: a request per token, and blocks of one slot."""
        workload = self.workload
        counts = tuple(count_selected(workload))
        given = {part.name: getattr(self, part.name) for part in fields(Inputs)}
        given |= {
            "workload": replace(
                workload,
                kind="latent" if workload.shares_values else "decode",
                query_lens=(1,) * workload.tokens,
                kv_lens=counts,
                block_size=1,
                selected=0,
            ),
            "key_cache": self.key_cache.flatten(0, 1)[:, None],
            "value_cache": self.value_cache.flatten(0, 1)[:, None],
            "block_table": self.slots.clamp(min=0),
            "query_start_loc": torch.arange(
                workload.tokens + 1, dtype=torch.int32, device=self.device
            ),
            "seq_lens": torch.tensor(counts, dtype=torch.int32, device=self.device),
        }
        return Inputs(**given)


@dataclass(frozen=True)
class IndexInputs:
    """The tensors of one workload of kind "score".

    Args:
        workload: The batch.
        query: [tokens, index_heads, index_head_dim] FP8.
        weights: [tokens, index_heads] float32.
        kv_cache: [num_blocks, block_size, index_head_dim + 4] uint8 codes and scales.
        block_table: [reqs, max_blocks] int32.
        query_start_loc: [reqs + 1] int32.
        seq_lens: [reqs] int32.
    """

    workload: Workload
    query: Tensor
    weights: Tensor
    kv_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor

    @property
    def max_seq_len(self) -> int:
        return max(self.workload.kv_lens)


@dataclass(frozen=True)
class SelectInputs:
    """The tensors of one workload of kind "select".

    Args:
        workload: The batch.
        scores: [tokens, keys] float32; -inf where a key is not visible.
    """

    workload: Workload
    scores: Tensor


AnyInputs = Inputs | IndexInputs | SelectInputs


def draw_any_inputs(
    workload: Workload, seed: int, device: torch.device | str
) -> AnyInputs:
    """Return the tensors of a workload of any kind, all drawn from the seed."""
    if workload.kind == "sparse":
        return draw_sparse_inputs(workload, seed, device)
    if workload.kind == "score":
        return draw_index_inputs(workload, seed, device)
    if workload.kind == "select":
        generator = torch.Generator(device=device).manual_seed(seed)
        shape = (workload.tokens, max(workload.kv_lens))
        scores = torch.randn(shape, device=device, generator=generator)
        seen = torch.tensor(visible_keys(workload), device=device)
        position = torch.arange(shape[1], device=device)
        scores.masked_fill_(position >= seen[:, None], -torch.inf)
        return SelectInputs(workload, scores)
    return draw_inputs(workload, seed, device)


def draw_sparse_inputs(
    workload: Workload, seed: int, device: torch.device | str
) -> SparseInputs:
    """Return a paged batch, and slots of randomly selected visible keys of each token."""
    kind = "latent" if workload.shares_values else "decode"
    paged = draw_inputs(replace(workload, kind=kind), seed, device)
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    slots = torch.full(
        (workload.tokens, workload.selected), -1, dtype=torch.int32, device=device
    )
    size, token = workload.block_size, 0
    for req, new in enumerate(workload.query_lens):
        row = paged.block_table[req]
        for seen in range(workload.kv_lens[req] - new + 1, workload.kv_lens[req] + 1):
            drawn = torch.randperm(seen, device=device, generator=generator)
            position = drawn[: workload.selected]
            found = row[position // size] * size + position % size
            slots[token, : len(found)] = found
            token += 1
    given = {part.name: getattr(paged, part.name) for part in fields(Inputs)}
    return SparseInputs(**given | {"workload": workload}, slots=slots)


def draw_index_inputs(
    workload: Workload, seed: int, device: torch.device | str
) -> IndexInputs:
    """Return queries, and an indexer's cache of random codes and scales in scattered blocks."""
    generator = torch.Generator(device=device).manual_seed(seed)
    size, dim = workload.block_size, workload.head_size
    counts = [-(-kv // size) for kv in workload.kv_lens]
    num_blocks = sum(counts)
    cache = torch.zeros(
        num_blocks, size, dim + SCALE_BYTES, dtype=torch.uint8, device=device
    )
    codes, scales = split_indexer_cache(cache)
    numbers = torch.randn(codes.shape, device=device, generator=generator)
    # codes of normal numbers that were divided by the largest of their key over 448
    codes.copy_((numbers * 128).clamp(-448, 448).to(FP8).view(torch.uint8))
    del numbers
    scales.copy_(
        torch.rand(scales.shape, device=device, generator=generator) / 128 + 1 / 256
    )
    shape = (workload.tokens, workload.query_heads)
    query = torch.randn(*shape, dim, device=device, generator=generator)
    weights = torch.randn(shape, device=device, generator=generator)
    order = torch.randperm(num_blocks, device=device, generator=generator).int()
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    for row, own in zip(table, torch.split(order, counts), strict=True):
        row[: len(own)] = own
    starts = torch.tensor([0, *workload.query_lens]).cumsum(0)
    return IndexInputs(
        workload,
        (query * 64).clamp(-448, 448).to(FP8),
        weights / 64,
        cache,
        table,
        starts.int().to(device),
        torch.tensor(workload.kv_lens, dtype=torch.int32, device=device),
    )
