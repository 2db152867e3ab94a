"""Steps of a layer with sparse latent attention for the vLLM plugin, as vLLM makes them.

An indexer is played by the test: it writes positions to the buffer that vLLM's indexer has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from pagetwin.conformance.oracles.brute_force import (
    OracleRequest,
    attend_by_hand,
    judge_out,
    quantise_by_hand,
)
from pagetwin.conformance.oracles.latent_formats import load_by_hand, store_by_hand
from torch import Tensor

from support.fake_vllm import recorded
from support.vllm_steps import vllm_config

BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS = 16, 20, 5
HEADS, SCALE, K_SCALE = 4, 0.1, 0.5
TOPK, MAX_TOKENS = 24, 96
STALE = 0
"""The position in rows of the buffer that the indexer has not written in a step."""


@dataclass
class Choice:
    """How the test selects positions.

    Args:
        repeats: whether each token names its first position twice.
        is_first: whether a row begins with its positions, as that of an indexer. If not, entries of
            -1 are anywhere.
        past: whether a row also has a position past the end of the block table.
        most: positions that a token selects.
    """

    repeats: bool = False
    is_first: bool = True
    past: bool = False
    most: int = TOPK - 2


@dataclass
class Request:
    """A sequence: its blocks, and its latents with their rope keys so far."""

    blocks: list[int]
    latents: Tensor
    selected: list[list[int]] = field(default_factory=list)


class SparseSteps:
    """One layer with its cache, and sequences that grow step by step.

    Args:
        version: version of the stand-in that is installed.
        kv_cache_dtype: vLLM's name of the cache's dtype.
        dtype: dtype of the model.
        rank, rope: elements of a latent and of a rope key.
        has_indexer: whether the layer has the indexer. If not, it has an earlier layer's buffer.
        device: device of the tensors.
        gap: elements from the end of a block to the next one. vLLM may store other layers there.
        requests: sequences.
        backend: Optional. The backend class. If None, that of the plugin.
    """

    def __init__(
        self,
        version: str,
        kv_cache_dtype: str = "auto",
        dtype: torch.dtype = torch.float32,
        rank: int = 32,
        rope: int = 16,
        has_indexer: bool = True,
        device: str = "cpu",
        gap: int = 0,
        requests: int = 3,
        backend: Any = None,
    ) -> None:
        from pagetwin.integrations.vllm.plugin import choose_backend

        self.version, self.dtype, self.device = version, dtype, device
        self.kv_cache_dtype, self.rank, self.rope = kv_cache_dtype, rank, rope
        self.random, self.pick = torch.Generator().manual_seed(5), Random(5)
        shape = (MAX_TOKENS, TOPK)
        self.buffer = torch.full(shape, STALE, dtype=torch.int32, device=device)
        given: dict[str, Any] = {"topk_indices_buffer": self.buffer}
        if has_indexer:
            indexer = SimpleNamespace(topk_indices_buffer=self.buffer)
            given["indexer"] = indexer
        backend = backend or choose_backend()
        self.impl = make_layer(backend, kv_cache_dtype, rank, rope, **given)
        self.layer = SimpleNamespace(
            impl=self.impl,
            layer_name="layer",
            _k_scale=torch.tensor(K_SCALE, device=device),
        )
        config = vllm_config({"layer": self.layer})
        config.scheduler_config.max_num_batched_tokens = MAX_TOKENS
        spec = MLAAttentionSpec(BLOCK_SIZE)
        self.builder = backend.get_builder_cls()(
            spec, ["layer"], config, torch.device(device)
        )
        self.impl.bounds = None  # warm-up has tests of its own
        self.cache = self._make_cache(backend, gap)
        blocks = self.pick.sample(range(NUM_BLOCKS), requests * MAX_BLOCKS)
        self.requests = [
            Request(blocks[first : first + MAX_BLOCKS], self._rows(0, rank + rope))
            for first in range(0, len(blocks), MAX_BLOCKS)
        ]

    def _make_cache(self, backend: Any, gap: int) -> Tensor:
        """Return the cache as that version allocates it, full of NaN."""
        from pagetwin.integrations.vllm.latent_layers import record_bytes

        width = record_bytes(self.kv_cache_dtype) or self.rank + self.rope
        if hasattr(backend, "get_kv_cache_shape"):
            sizes = (NUM_BLOCKS, BLOCK_SIZE, 1, self.rank + self.rope)
            shape = backend.get_kv_cache_shape(*sizes, self.kv_cache_dtype)
            assert shape == (NUM_BLOCKS, BLOCK_SIZE, width)
        is_bytes = self.kv_cache_dtype not in ("auto", "bfloat16")
        dtype, poison = (torch.uint8, 0x7F) if is_bytes else (self.dtype, torch.nan)
        block = BLOCK_SIZE * width + gap
        pages = torch.full((NUM_BLOCKS, block), poison, dtype=dtype, device=self.device)
        return pages[:, : BLOCK_SIZE * width].view(NUM_BLOCKS, BLOCK_SIZE, width)

    def _rows(self, *shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=self.random)
        return numbers.to(self.device, self.dtype)

    def hit_prefix(self, source: int, target: int, blocks: int) -> None:
        """Let a new request begin with full blocks of another one."""
        own, other = self.requests[target], self.requests[source]
        own.blocks[:blocks] = other.blocks[:blocks]
        own.latents = other.latents[: blocks * BLOCK_SIZE].clone()

    def common(self, query_lens: Sequence[int], padding: int, spare_reqs: int) -> Any:
        """Return vLLM's description of a step, whose tensors are longer than the step.

        Args:
            query_lens: new tokens of each request, which its sequence has already.
            padding: rows after the last token that count, as in a captured graph.
            spare_reqs: requests without tokens after the last one, as in a captured graph.
        """
        from vllm.v1.attention.backend import CommonAttentionMetadata

        used = self.requests[: len(query_lens)]
        ends = torch.tensor([0, *query_lens]).cumsum(0)
        starts = torch.cat([ends, ends[-1:].repeat(spare_reqs)]).int()
        lens = [len(request.latents) for request in used] + [0] * spare_reqs
        table = torch.zeros(len(lens) + 2, MAX_BLOCKS, dtype=torch.int32)
        table[: len(used)] = torch.tensor([request.blocks for request in used])
        slots = [
            slot
            for request, count in zip(used, query_lens, strict=True)
            for slot in self.slots(request)[len(request.latents) - count :]
        ]
        spare = torch.full((2,), -7, dtype=torch.int32)
        fields = dict(
            query_start_loc=torch.cat([starts, spare]),
            query_start_loc_cpu=starts,
            seq_lens=torch.cat([torch.tensor(lens, dtype=torch.int32), spare]),
            num_reqs=len(lens),
            num_actual_tokens=int(starts[-1]) + padding,
            max_query_len=max(query_lens),
            max_seq_len=MAX_BLOCKS * BLOCK_SIZE,
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots + [-1] * padding),
            causal=True,
        )
        known = recorded(self.version)["modules"]["vllm.v1.attention.backend"]
        taken = known["classes"]["CommonAttentionMetadata"]["attributes"]
        assert set(fields) <= set(taken)
        moved = {
            name: value.to(self.device)
            if isinstance(value, Tensor) and not name.endswith("_cpu")
            else value
            for name, value in fields.items()
        }
        return CommonAttentionMetadata(**moved)

    def slots(self, request: Request) -> list[int]:
        """Return the slots of a sequence."""
        return [
            request.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for position in range(len(request.latents))
        ]

    def grow(self, query_lens: Sequence[int]) -> Tensor:
        """Add new tokens to the sequences, and return their latents and rope keys."""
        new = [self._rows(count, self.rank + self.rope) for count in query_lens]
        for request, latents in zip(self.requests, new, strict=False):
            request.latents = torch.cat([request.latents, latents])
        return torch.cat(new)

    def select(self, query_lens: Sequence[int], choice: Choice) -> list[list[int]]:
        """Write the positions that each new token selects, and return them."""
        rows: list[list[int]] = []
        for request, count in zip(self.requests, query_lens, strict=False):
            first = len(request.latents) - count
            for position in range(first, len(request.latents)):
                visible = position + 1
                own = self.pick.sample(range(visible), min(choice.most, visible))
                rows.append(own + own[:1] * choice.repeats)
        self.buffer.fill_(STALE)
        for token, row in enumerate(rows):
            extra = [MAX_BLOCKS * BLOCK_SIZE] * choice.past
            named = torch.tensor([*row, *extra], dtype=torch.int32)
            columns = list(range(len(named)))
            if not choice.is_first:
                columns = sorted(self.pick.sample(range(TOPK), len(named)))
            line = torch.full((TOPK,), -1, dtype=torch.int32)
            line[columns] = named
            self.buffer[token] = line.to(self.device)
        return rows

    def write(self, new: Tensor, common: Any) -> None:
        """Write new latents, as vLLM's layer does."""
        padding = len(common.slot_mapping) - len(new)
        rows = torch.cat([new, new.new_full((padding + 1, new.shape[1]), torch.nan)])
        self.impl.do_kv_cache_update(
            rows[:, : self.rank],
            rows[:, None, self.rank :],
            self.cache,
            common.slot_mapping,
            self.kv_cache_dtype,
            self.layer._k_scale,
        )

    def attend(self, query: Tensor, metadata: Any, in_parts: bool = True) -> Tensor:
        """Return what the layer computes."""
        cache = self.cache
        if self.kv_cache_dtype.startswith("fp8") and "mla" not in self.kv_cache_dtype:
            cache = cache.view(torch.float8_e4m3fn)
        parts = query.split([self.rank, self.rope], dim=2) if in_parts else query
        out, lse = self.impl.forward_mqa(parts, cache, metadata, self.layer)
        assert lse is None and metadata.num_decode_tokens == len(query)
        found: Tensor = out
        return found

    def step(
        self,
        query_lens: Sequence[int],
        choice: Choice | None = None,
        padding: int = 0,
        spare_reqs: int = 0,
        in_parts: bool = True,
    ) -> float:
        """Run a step, and return the error of its output divided by the budget."""
        new = self.grow(query_lens)
        common = self.common(query_lens, padding, spare_reqs)
        rows = self.select(query_lens, choice or Choice())
        metadata = self.builder.build(0, common)
        self.write(new, common)
        query = self._rows(len(new) + padding, HEADS, self.rank + self.rope)
        out = self.attend(query, metadata, in_parts)
        assert not out[len(new) :].any()
        return self.judge(query, query_lens, rows, out)

    def stored(self, request: Request) -> Tensor:
        """Return the latents of a sequence as a cache has them."""
        latents = request.latents.cpu()
        if self.kv_cache_dtype in ("fp8", "fp8_e4m3"):
            rows = latents[:, None]
            return quantise_by_hand(rows, K_SCALE, torch.float8_e4m3fn)[:, 0]
        if "mla" not in self.kv_cache_dtype or not len(latents):
            return latents
        parts = latents.float().split([self.rank, self.rope], dim=1)
        records = store_by_hand(self.kv_cache_dtype, *parts)
        return load_by_hand(self.kv_cache_dtype, records)

    def judge(
        self,
        query: Tensor,
        query_lens: Sequence[int],
        rows: list[list[int]],
        out: Tensor,
    ) -> float:
        """Return the error of an output divided by its budget; at most 1 is correct."""
        owners = [
            request
            for request, count in zip(self.requests, query_lens, strict=False)
            for _ in range(count)
        ]
        kept = {id(request): self.stored(request) for request in self.requests}
        requests = []
        for token, (request, row) in enumerate(zip(owners, rows, strict=True)):
            key = kept[id(request)][row][:, None]
            own = query[token : token + 1].cpu()
            requests.append(OracleRequest(own, key, key[..., : self.rank]))
        options: dict[str, Any] = {"causal": False, "scale": SCALE}
        if self.kv_cache_dtype in ("fp8", "fp8_e4m3"):
            options |= {"k_scale": K_SCALE, "v_scale": K_SCALE}
        answer = attend_by_hand(requests, options, len(rows))
        verdict = judge_out(
            out[: len(rows)], answer, answer.out.to(self.dtype), self.dtype
        )
        return verdict.worst if verdict.finite else float("inf")


@dataclass
class MLAAttentionSpec:
    """Has the name of vLLM's class, and the fields that are read."""

    block_size: int
    sliding_window: int | None = None


def make_layer(
    backend: Any, kv_cache_dtype: str, rank: int, rope: int, **given: Any
) -> Any:
    """Return a layer of the stand-in that is installed, as vLLM makes one."""
    made: Any = backend.get_impl_cls()(
        num_heads=HEADS,
        head_size=rank + rope,
        scale=SCALE,
        num_kv_heads=1,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype=kv_cache_dtype,
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        q_lora_rank=None,
        kv_lora_rank=rank,
        qk_nope_head_dim=24,
        qk_rope_head_dim=rope,
        qk_head_dim=24 + rope,
        v_head_dim=24,
        kv_b_proj=None,
        **{"indexer": None} | given,
    )
    return made
