"""Batches for latent attention (MLA), and their expected results.

As in `batches`, but the cache holds one latent and one rope key per token. The expected result is
full multi-head attention: every latent is expanded to the keys and values of all heads in float64,
and the brute-force oracle computes attention key by key. A needle outweighs other keys either by
its latent or by its rope key.
"""

from dataclasses import dataclass, field, replace
from itertools import accumulate
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..base.support import Support, bounds_of, nearest_length
from ..oracles.brute_force import (
    Answer,
    OracleRequest,
    attend_by_hand,
    quantise_by_hand,
)
from .batches import (
    DTYPES,
    NAN,
    NEEDLES,
    TABLES,
    draw_lengths,
    draw_rows,
    needle_position,
    put_on,
    table_of_rows,
)
from .caches import FP8
from .reuse import compiled

LAYOUTS = ("packed", "padded", "every other element", "slots first")


@dataclass(frozen=True)
class LatentPlan:
    """A batch in small numbers.

    Args:
        query_lens, key_lens: New tokens and keys of each request.
        rank, rope, nope, value: Widths of the latent, the rope key, the rest of a head's key,
            and a head's value.
        cache_dtype: Optional. Element type of an FP8 cache. If None, that of the inputs.
        layout: Strides of the cache, one of LAYOUTS.
        needle: Position of the key that outweighs all others of its sequence, one of NEEDLES.
        is_rope: Whether the needle outweighs other keys by its rope key, not by its latent.
        padding: Query rows after the last request.
        spare_max: Tokens by which the upper bounds that a call passes exceed the actual maxima.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    block_size: int = 16
    heads: int = 3
    rank: int = 16
    rope: int = 8
    nope: int = 16
    value: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    k_scale: float = 0.5
    layout: str = "packed"
    table: str = "scattered"
    needle: str = "none"
    is_rope: bool = False
    rope_size: float = 1.0
    scale: float | None = None
    sliding_window: int | None = None
    padding: int = 0
    spare_max: int = 0
    seed: int = 0

    def within(self, support: Support) -> "LatentPlan":
        """Return the nearest plan inside of the declared support."""
        lens = [
            nearest_length(query_len, support.query_lens)
            for query_len in self.query_lens
        ]
        keys = [
            nearest_length(max(key_len, new), support.seq_lens)
            for key_len, new in zip(self.key_lens, lens, strict=True)
        ]
        dtypes = support.dtypes
        taken = [
            dtype for dtype in DTYPES if dtypes is None or name_of(dtype) in dtypes
        ]
        dtype = self.dtype
        if taken and dtype not in taken:
            dtype = taken[self.seed % len(taken)]
        sizes = sorted(support.block_sizes or [self.block_size])
        is_size = self.block_size in sizes
        stored = self.cache_dtype
        caches = support.cache_dtypes
        if stored is not None and (
            support.why_not_options({"k_scale": self.k_scale})
            or (caches is not None and name_of(stored) not in caches)
        ):
            stored = None

        spare = self.spare_max
        for own, taken_lens in ((lens, support.query_lens), (keys, support.seq_lens)):
            if taken_lens and max(own, default=0) + spare > bounds_of(taken_lens)[1]:
                spare = 0

        def option(name: str, value: Any) -> Any:
            return None if support.why_not_options({name: value}) else value

        return replace(
            self,
            query_lens=tuple(lens),
            key_lens=tuple(keys),
            dtype=dtype,
            block_size=self.block_size if is_size else sizes[self.seed % len(sizes)],
            cache_dtype=stored,
            scale=option("scale", self.scale),
            sliding_window=option("sliding_window", self.sliding_window),
            spare_max=spare,
        )


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype as `Support` spells it."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class LatentBatch:
    """The tensors of a plan, and its block ids on the host."""

    plan: LatentPlan
    q_nope: Tensor
    q_pe: Tensor
    kv_c: Tensor
    k_pe: Tensor
    kv_cache: Tensor
    w_uk: Tensor
    w_uv: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    rows: list[list[int]] = field(repr=False)

    @property
    def tokens(self) -> int:
        """New tokens, padding not counted."""
        return sum(self.plan.query_lens)

    def decode_arguments(self) -> dict[str, Any]:
        """Return the arguments of `latent_decode_attention` by name, its options too."""
        plan = self.plan
        names = ["q_nope", "q_pe", "kv_cache", "w_uk", "w_uv", "block_table"]
        names += ["query_start_loc", "seq_lens"]
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        most = self.block_table.shape[1] * plan.block_size
        given["max_query_len"] = max(plan.query_lens, default=0) + plan.spare_max
        longest = max(plan.key_lens, default=0) + plan.spare_max
        given["max_seq_len"] = min(longest, most)
        if plan.scale is not None:
            given["scale"] = plan.scale
        if plan.cache_dtype is not None:
            given["k_scale"] = plan.k_scale
        if plan.sliding_window is not None:
            given["sliding_window"] = plan.sliding_window
        return given

    def prefill_arguments(self) -> dict[str, Any]:
        """Return the arguments of `latent_prefill_attention` by name, its options too."""
        context = sum(self.plan.key_lens) - self.tokens
        given = self.decode_arguments() | {"kv_c": self.kv_c, "k_pe": self.k_pe}
        given.pop("sliding_window", None)
        return given | {"num_context_tokens": context + self.plan.spare_max}

    def latents(self, req: int, is_prefill: bool) -> Tensor:
        """Return [keys, rank + rope] of a sequence in float64, as prefill or decode reads them.

        A prefill reads its new tokens from its inputs. All other latents are read from the cache.
        """
        cache = self.kv_cache.cpu().double()
        if self.plan.cache_dtype is not None:
            cache = cache * self.plan.k_scale
        size, row = self.plan.block_size, self.rows[req]
        positions = range(self.plan.key_lens[req])
        blocks = [row[position // size] for position in positions]
        line = cache[blocks, [position % size for position in positions]]
        if is_prefill:
            first = sum(self.plan.query_lens[:req])
            own = slice(first, first + self.plan.query_lens[req])
            new = torch.cat([self.kv_c, self.k_pe], 1).cpu().double()[own]
            line = torch.cat([line[: len(line) - len(new)], new])
        return line

    def answer(self, is_prefill: bool) -> Answer:
        """Return the exact multi-head attention of all new tokens."""
        plan = self.plan
        w_uk, w_uv = self.w_uk.cpu().double(), self.w_uv.cpu().double()
        queries = torch.cat([self.q_nope, self.q_pe], 2).cpu().double()[: self.tokens]
        window = None if is_prefill else plan.sliding_window
        options = {"causal": True, "scale": plan.scale, "sliding_window": window}
        requests, sizes, largest = [], [], []
        parts = torch.split(queries, list(plan.query_lens))
        empty = queries.new_empty(0, plan.rank + plan.rope)
        latents = [self.latents(req, is_prefill) for req in range(len(parts))]
        for query, line in zip(parts, latents, strict=True):
            latent, rope = line[:, : plan.rank], line[:, plan.rank :]
            shared = rope[:, None].expand(-1, plan.heads, -1)
            key = torch.cat([torch.einsum("tl,hnl->thn", latent, w_uk), shared], 2)
            value = torch.einsum("tl,hlv->thv", latent, w_uv)
            size = torch.einsum("tl,hlv->thv", latent.abs(), w_uv.abs())
            requests.append(OracleRequest(query, key, value))
            sizes.append(OracleRequest(query, key, size))
            nope = torch.einsum("tl,hnl->thn", latent.abs(), w_uk.abs())
            most = torch.cat([nope, shared.abs()], 2)
            scores = torch.einsum("qhn,thn->hqt", query.abs(), most)
            largest.append(
                scores.amax(2) if len(line) else scores.new_zeros(scores.shape[:2])
            )
        if not requests:
            key = empty.new_empty(0, plan.heads, plan.nope + plan.rope)
            requests = sizes = [
                OracleRequest(key, key, key.new_empty(0, plan.heads, plan.value))
            ]
        tokens = len(self.q_nope)
        found = attend_by_hand(requests, options, tokens)
        scale = plan.scale or (plan.nope + plan.rope) ** -0.5
        scores = torch.zeros_like(found.lse)
        scores[:, : self.tokens] = torch.cat([found.lse[:, :0], *largest], 1) * scale
        of_sizes = attend_by_hand(sizes, options, tokens).out
        return replace(found, sizes=of_sizes, scores=scores)


def empty_latent_cache(plan: LatentPlan, num_blocks: int) -> Tensor:
    """Return a latent cache full of NaN, in the layout of the plan."""
    width = plan.rank + plan.rope
    dtype = plan.cache_dtype or plan.dtype

    def full(*shape: int) -> Tensor:
        return torch.full(shape, NAN).to(dtype)

    if plan.layout == "padded":
        return full(num_blocks, plan.block_size, width + 3)[..., :width]
    if plan.layout == "every other element":
        return full(num_blocks, plan.block_size, 2 * width)[..., ::2]
    if plan.layout == "slots first":
        return full(plan.block_size, num_blocks, width).transpose(0, 1)
    return full(num_blocks, plan.block_size, width)


def build_latents(plan: LatentPlan, device: torch.device) -> LatentBatch:
    """Return the tensors of a plan, with NaN in unallocated slots and garbage past table rows."""
    generator = torch.Generator().manual_seed(plan.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    size, rank, rope = plan.block_size, plan.rank, plan.rope
    counts = [-(-key_len // size) for key_len in plan.key_lens]
    rows, num_blocks = draw_rows(counts, plan.table, generator)
    max_blocks = max(counts, default=0) + 1
    table = table_of_rows(rows, max_blocks)

    # step: draw queries, projections and latents, with needles among the latents
    tokens = sum(plan.query_lens)
    w_uk = random(plan.heads, plan.nope, rank) / rank**0.5
    w_uv = random(plan.heads, rank, plan.value) / rank**0.5
    queries = random(tokens + plan.padding, plan.heads, plan.nope + rope)
    latents = random(num_blocks, size, rank + rope)
    scale = plan.scale or (plan.nope + rope) ** -0.5
    lean = torch.nn.functional.normalize(random(rank), dim=0)
    rope_lean = torch.nn.functional.normalize(random(rope), dim=0)
    starts = [0, *accumulate(plan.query_lens)]
    for req, (query_len, key_len) in enumerate(
        zip(plan.query_lens, plan.key_lens, strict=True)
    ):
        position = needle_position(plan.needle, query_len, key_len, size)
        own = queries[starts[req] : starts[req + 1]]
        if position is None:
            continue
        # components along one direction: 2 in each query, 12 / scale in this key; score 24
        key = latents[rows[req][position // size], position % size]
        own *= 0.25
        key[:rank] += 3 * random(rank)
        if plan.is_rope:
            own[..., plan.nope :] += 2 * rope_lean
            key[rank:] = 12 / scale * rope_lean
        else:
            towards = w_uk @ lean  # [heads, nope]
            length = towards.square().sum(1, keepdim=True)
            own[..., : plan.nope] += 2 * towards / length
            key[:rank] = 12 / scale * lean
    # the scores stay as they are
    latents[..., rank:] *= plan.rope_size
    queries[..., plan.nope :] /= plan.rope_size
    queries[tokens:] = NAN

    # step: store the latents of all sequences in the cache
    kv_cache = empty_latent_cache(plan, num_blocks)
    for row, key_len in zip(rows, plan.key_lens, strict=True):
        for position in range(key_len):
            at = row[position // size], position % size
            if plan.cache_dtype is None:
                kv_cache[at] = latents[at].to(plan.dtype)
            else:
                stored = quantise_by_hand(
                    latents[at][None, None], plan.k_scale, plan.cache_dtype
                )
                kv_cache[at] = stored[0, 0]
    queries = queries.to(plan.dtype)
    batch = LatentBatch(
        plan=plan,
        q_nope=queries[..., : plan.nope],
        q_pe=queries[..., plan.nope :],
        kv_c=queries,
        k_pe=queries,
        kv_cache=kv_cache,
        w_uk=w_uk.to(plan.dtype),
        w_uv=w_uv.to(plan.dtype),
        block_table=table,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(plan.key_lens, dtype=torch.int32),
        rows=rows,
    )
    # step: pass the latents of new tokens also as inputs, as slices of one projection
    new = [
        latents[row[position // size], position % size]
        for row, query_len, key_len in zip(
            rows, plan.query_lens, plan.key_lens, strict=True
        )
        for position in range(key_len - query_len, key_len)
    ]
    fused = torch.full((tokens + plan.padding, rank + rope + 5), NAN)
    fused[:tokens, : rank + rope] = torch.stack(new) if new else latents[0, :0]
    fused = fused.to(plan.dtype)
    batch = replace(batch, kv_c=fused[:, :rank], k_pe=fused[:, rank : rank + rope])
    moved: dict[str, Any] = {
        name: put_on(value, device)
        for name, value in vars(batch).items()
        if isinstance(value, Tensor)
    }
    return replace(batch, **moved)


@st.composite
def latent_plans(draw: st.DrawFn, max_reqs: int = 3) -> LatentPlan:
    """Return the plan of a batch; all values are derived from one seed."""
    pick = Random(draw(st.integers(0, 2**20)))
    kernel = compiled(pick)
    reqs = 0 if pick.random() < 0.05 else pick.randint(1, max_reqs)
    block_size = kernel.choice([1, 3, 16, 16])
    batch = draw_lengths(pick, block_size, reqs)
    return LatentPlan(
        query_lens=tuple(query_len for query_len, _ in batch),
        key_lens=tuple(key_len for _, key_len in batch),
        block_size=block_size,
        heads=kernel.choice([1, 2, 3, 5]),
        rank=kernel.choice([16, 24, 1]),
        rope=kernel.choice([8, 24, 1]),
        nope=kernel.choice([16, 16, 5]),
        value=kernel.choice([16, 16, 7]),
        dtype=kernel.choice(DTYPES),
        cache_dtype=kernel.choice([None, None, *FP8]),
        k_scale=pick.choice([0.5, 0.03, 1.7]),
        layout=kernel.choice(LAYOUTS),
        table=pick.choice(TABLES),
        needle=pick.choice(["none", *NEEDLES]),
        is_rope=pick.random() < 0.5,
        scale=pick.choice([None, None, 0.3]),
        padding=pick.choice([0, 0, 1, 3]),
        spare_max=pick.choice([0, 0, 5]),
        rope_size=pick.choice([1.0, 1.0, 300.0]),
        seed=pick.randrange(2**16),
    )
