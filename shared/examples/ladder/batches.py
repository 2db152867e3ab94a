"""Batches of the ladder, and the float64 result that each rung is compared with.

Every rung solves the plain case: causal attention of new tokens over their sequences, all tensors
packed, no option. The numbers of a batch are random normal, and its blocks are in random order.
Memory that is not allocated is NaN: the slots past the end of each sequence, and one block that
the rest of each block-table row names.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...contract.budgets import Verdict, judge_rows
from ...contract.operations import load_implementation

BLOCK_SIZE = 16
NAN = float("nan")


@dataclass(frozen=True)
class LadderBatch:
    """One step's attention.

    Args:
        query: [tokens, query_heads, head_size].
        key_cache, value_cache: [num_blocks, block_size, kv_heads, head_size].
        block_table: [reqs, width]; the width is a multiple of 16.
        query_start_loc: [reqs + 1]; seq_lens: [reqs].
        query_lens, kv_lens: new tokens and keys of each request, on the host; at least one.
    """

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    @property
    def reqs(self) -> int:
        return len(self.kv_lens)

    @property
    def table_width(self) -> int:
        return self.block_table.shape[1]

    @property
    def scale(self) -> float:
        return float(self.query.shape[2] ** -0.5)

    @property
    def sizes(self) -> dict[str, int]:
        """What every kernel knows when it is compiled."""
        _, block_size, kv_heads, head_size = self.key_cache.shape
        return {
            "QUERY_HEADS": self.query.shape[1],
            "KV_HEADS": kv_heads,
            "HEAD_SIZE": head_size,
            "BLOCK_SIZE": block_size,
        }

    @property
    def bytes(self) -> int:
        """Read and written at least: each key and value, each query, each output once."""
        row = self.key_cache[0, 0].numel() * self.key_cache.element_size()
        return 2 * sum(self.kv_lens) * row + 2 * self.query.nbytes

    @property
    def flops(self) -> int:
        """Four for each element of a head, query head, query and key that it attends to."""
        seen = sum(
            new * kv - new * (new - 1) // 2
            for new, kv in zip(self.query_lens, self.kv_lens, strict=True)
        )
        return 4 * seen * self.query.shape[1] * self.query.shape[2]


def random_batch(
    query_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
) -> LadderBatch:
    """Return a batch; `heads` is query heads, kv heads, elements of a head."""
    query_heads, kv_heads, head_size = heads
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype, device=device)

    blocks = [-(-kv // BLOCK_SIZE) for kv in kv_lens]
    unused = sum(blocks)
    order = torch.randperm(unused, generator=generator, device=device).int().cpu()
    width = -(-max(blocks) // 16) * 16
    table = torch.full((len(kv_lens), width), unused, dtype=torch.int32)
    caches = [random(unused + 1, BLOCK_SIZE, kv_heads, head_size) for _ in "kv"]
    for cache in caches:
        cache[unused] = NAN
    for req, own in enumerate(order.split(blocks)):
        table[req, : len(own)] = own
    for req, kv in enumerate(kv_lens):
        last = int(table[req, (kv - 1) // BLOCK_SIZE])
        for cache in caches:
            cache[last, (kv - 1) % BLOCK_SIZE + 1 :] = NAN
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    return LadderBatch(
        random(sum(query_lens), query_heads, head_size),
        caches[0],
        caches[1],
        table.to(device),
        starts.to(device),
        torch.tensor(kv_lens, dtype=torch.int32, device=device),
        query_lens,
        kv_lens,
    )


@dataclass(frozen=True)
class LadderTruth:
    """What some tokens of a batch should get; the rows of a result are its (token, head) pairs.

    Args:
        tokens: which tokens.
        exact: [rows, head_size] in float64.
        same_dtype: the same from plain torch in the batch's own dtype.
    """

    tokens: Tensor
    exact: Tensor
    same_dtype: Tensor

    def judge(self, out: Tensor) -> Verdict:
        """Return how these tokens' rows stand against their budgets; NaN anywhere is wrong."""
        rows = out[self.tokens].flatten(0, 1)
        verdict = judge_rows(rows, self.exact, self.same_dtype, out.dtype)
        if not bool(out.isfinite().all()):
            return Verdict(float("inf"), -1, float("inf"), verdict.budget, False)
        return verdict


def truth(batch: LadderBatch, most: int | None = None) -> LadderTruth:
    """Return what the reference says about all tokens, or about `most` of them, evenly spread.

    A token of a prompt is a decode whose sequence ends with it, and so it is judged as one.
    """
    ends = [
        (req, kv - new + place + 1)
        for req, (new, kv) in enumerate(
            zip(batch.query_lens, batch.kv_lens, strict=True)
        )
        for place in range(new)
    ]
    count = min(len(ends), most or len(ends))
    tokens = torch.linspace(0, len(ends) - 1, count).round().long()
    reqs, lens = torch.tensor([ends[token] for token in tokens.tolist()]).T
    device = batch.query.device
    tokens = tokens.to(device)
    sampled = (
        batch.query[tokens],
        batch.key_cache,
        batch.value_cache,
        batch.block_table[reqs.to(device)],
        torch.arange(count + 1, dtype=torch.int32, device=device),
        lens.int().to(device),
        1,
        int(lens.max()),
    )
    attend: Any = load_implementation("reference").paged_attention
    answers = (
        attend(
            *sampled,
            out=torch.empty_like(sampled[0], dtype=dtype),
            compute_dtype=dtype,
        ).flatten(0, 1)
        for dtype in (torch.float64, batch.query.dtype)
    )
    return LadderTruth(tokens, *answers)


def num_processors(device: torch.device) -> int:
    """Return a GPU's multiprocessors; on the host a few, so that programs share the work."""
    if device.type != "cuda":
        return 6
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
