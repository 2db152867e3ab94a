"""Does latent attention see what full multi-head attention would, and are its widths right?

The truth here shares no code with either twin: every latent is expanded to the keys and values of
all heads, which attend one by one, in float64.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Twin
from hypothesis import given, settings
from hypothesis import strategies as st
from pagetwin.conformance.generators.batches import (
    DTYPES,
    GARBAGE,
    NAN,
    NEEDLES,
    TABLES,
    draw_lengths,
    draw_rows,
    needle_position,
)
from pagetwin.conformance.oracles.dense import bits, same_bits
from pagetwin.contract.budgets import Verdict, judge_rows
from pagetwin.contract.kinds import FP8_DTYPES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WIDTHS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 96,
}
LAYOUTS = ("packed", "padded", "every other element", "slots first")
WAYS = ("decode", "prefill")
# each example runs a twin several times, and the interpreter is slow
FEWER = settings(max_examples=min(12, settings().max_examples))


@dataclass(frozen=True)
class Plan:
    """A batch in small numbers.

    Args:
        query_lens, kv_lens: new tokens and keys of each request.
        rank, rope, nope, value: widths of the latent, the rope key, the rest of a head's key,
            and a head's value.
        cache_dtype: of an FP8 cache; None: the inputs' own.
        needle: where the key lies that outweighs all others of its sequence.
        needle_part: whether it does so by its latent or by its rope key.
        padding: query rows behind the last request.
    """

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
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
    needle_part: str = "latent"
    scale: float | None = None
    padding: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """The tensors of a plan, and the same facts on the host."""

    plan: Plan
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

    def decode_arguments(self) -> dict[str, Any]:
        """Return what `latent_decode_attention` takes, by name."""
        names = ("q_nope", "q_pe", "kv_cache", "w_uk", "w_uv", "block_table")
        names += ("query_start_loc", "seq_lens")
        return {name: getattr(self, name) for name in names} | {
            "max_query_len": max(self.plan.query_lens, default=0),
            "max_seq_len": max(self.plan.kv_lens, default=0),
            "scale": self.plan.scale,
            "k_scale": self.plan.k_scale if self.plan.cache_dtype else None,
        }

    def prefill_arguments(self) -> dict[str, Any]:
        """Return what `latent_prefill_attention` takes, by name."""
        context = sum(self.plan.kv_lens) - self.tokens
        return self.decode_arguments() | {
            "kv_c": self.kv_c,
            "k_pe": self.k_pe,
            "num_context_tokens": context,
        }

    def fresh(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return an output and a log-sum-exp full of NaN."""
        tokens, heads, _ = self.q_nope.shape
        dtype = dtype or self.plan.dtype
        lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        out = self.q_nope.new_full((tokens, heads, self.plan.value), NAN, dtype=dtype)
        return out, out.new_full((heads, tokens), NAN, dtype=lse_dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {k: v for k, v in vars(self).items() if isinstance(v, Tensor)}

    @property
    def tokens(self) -> int:
        """New tokens, padding not counted."""
        return sum(self.plan.query_lens)


def empty_cache(plan: Plan, num_blocks: int) -> Tensor:
    """Return a latent cache of NaN, as some view."""
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


def build(plan: Plan, device: torch.device | str = "cpu") -> Batch:
    """Return the tensors of a plan: NaN in slots that nobody owns, garbage behind the tables."""
    generator = torch.Generator().manual_seed(plan.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    block_size, rank, rope = plan.block_size, plan.rank, plan.rope
    counts = [-(-kv_len // block_size) for kv_len in plan.kv_lens]
    rows, num_blocks = draw_rows(counts, plan.table, generator)
    max_blocks = max(counts, default=0) + 1
    table = torch.tensor(GARBAGE, dtype=torch.int32).repeat(len(rows), max_blocks)
    table = table[:, :max_blocks].contiguous()
    for req, row in enumerate(rows):
        table[req, : len(row)] = torch.tensor(row, dtype=torch.int32)

    tokens = sum(plan.query_lens)
    w_uk = random(plan.heads, plan.nope, rank) / rank**0.5
    w_uv = random(plan.heads, rank, plan.value) / rank**0.5
    queries = random(tokens + plan.padding, plan.heads, plan.nope + rope)
    latents = {
        (block_id, offset): random(rank + rope)
        for row in rows
        for block_id in row
        for offset in range(block_size)
    }
    scale = plan.scale or (plan.nope + rope) ** -0.5
    direction = torch.nn.functional.normalize(random(rank), dim=0)
    rope_direction = torch.nn.functional.normalize(random(rope), dim=0)
    start = 0
    for query_len, kv_len, row in zip(plan.query_lens, plan.kv_lens, rows, strict=True):
        position = needle_position(plan.needle, query_len, kv_len, block_size)
        own = queries[start : start + query_len]
        start += query_len
        if position is None:
            continue
        # every query leans along this key, which lies far out: a score of 24
        key = latents[row[position // block_size], position % block_size]
        own *= 0.25
        key[: plan.rank] += 3 * random(rank)
        if plan.needle_part == "rope":
            own[..., plan.nope :] += 2 * rope_direction
            key[rank:] = 12 / scale * rope_direction
        else:
            lean = w_uk @ direction  # [heads, nope]
            own[..., : plan.nope] += 2 * lean / lean.square().sum(1, keepdim=True)
            key[:rank] = 12 / scale * direction
    queries[tokens:] = NAN
    kv_cache = empty_cache(plan, num_blocks)
    for row, kv_len in zip(rows, plan.kv_lens, strict=True):
        for position in range(kv_len):
            place = row[position // block_size], position % block_size
            if plan.cache_dtype is None:
                kv_cache[place] = latents[place].to(plan.dtype)
            else:
                largest = torch.finfo(plan.cache_dtype).max
                stored = (latents[place] / plan.k_scale).clamp(-largest, largest)
                kv_cache[place] = stored.to(plan.cache_dtype)
    queries = queries.to(plan.dtype)
    batch = Batch(
        plan=plan,
        q_nope=queries[..., : plan.nope],
        q_pe=queries[..., plan.nope :],
        kv_c=queries,
        k_pe=queries,
        kv_cache=kv_cache,
        w_uk=w_uk.to(plan.dtype),
        w_uv=w_uv.to(plan.dtype),
        block_table=table,
        query_start_loc=torch.tensor(
            [0, *itertools.accumulate(plan.query_lens)], dtype=torch.int32
        ),
        seq_lens=torch.tensor(plan.kv_lens, dtype=torch.int32),
        rows=rows,
    )
    # the new tokens' latents as the cache keeps them, as slices of one projection
    new = [
        sequence_latents(batch, req)[kv_len - query_len :]
        for req, (query_len, kv_len) in enumerate(
            zip(plan.query_lens, plan.kv_lens, strict=True)
        )
    ]
    fused = torch.full((tokens + plan.padding, rank + rope + 5), NAN)
    fused[:tokens, : rank + rope] = torch.cat(
        [*new, torch.empty(0, rank + rope)]
    ).float()
    fused = fused.to(plan.dtype)
    batch = replace(batch, kv_c=fused[:, :rank], k_pe=fused[:, rank : rank + rope])
    moved = {name: each.to(device) for name, each in batch.tensors().items()}
    return replace(batch, **moved) if str(device) != "cpu" else batch


def sequence_latents(batch: Batch, req: int) -> Tensor:
    """Return [kv_len, latent_width] what the cache holds of a sequence, in float64."""
    block_size, cache = batch.plan.block_size, batch.kv_cache.cpu().double()
    if batch.plan.cache_dtype is not None:
        cache = cache * batch.plan.k_scale
    row = batch.rows[req]
    found = [
        cache[row[position // block_size], position % block_size]
        for position in range(batch.plan.kv_lens[req])
    ]
    return torch.stack(found) if found else cache.new_empty(0, cache.shape[2])


@dataclass(frozen=True)
class Truth:
    """What full multi-head attention gives, in float64 on the host.

    Args:
        out: [tokens, heads, value]; lse: [heads, tokens].
        sizes: of `out`, the same sums over absolute values.
        score_sizes: [heads, tokens] the largest score, likewise.
    """

    out: Tensor
    lse: Tensor
    sizes: Tensor
    score_sizes: Tensor


Sees = Callable[[int, int], bool]


def attend(batch: Batch, sees: Sees = lambda position, key: key <= position) -> Truth:
    """Return full multi-head attention, head by head and query by query."""
    plan = batch.plan
    q_nope, q_pe, w_uk, w_uv = (
        x.cpu().double() for x in (batch.q_nope, batch.q_pe, batch.w_uk, batch.w_uv)
    )
    scale = plan.scale or (plan.nope + plan.rope) ** -0.5
    out = torch.zeros(*q_nope.shape[:2], plan.value, dtype=torch.float64)
    lse = torch.full((plan.heads, len(out)), -torch.inf, dtype=torch.float64)
    sizes, score_sizes = torch.zeros_like(out), torch.zeros_like(lse)
    token = 0
    for req, (query_len, kv_len) in enumerate(
        zip(plan.query_lens, plan.kv_lens, strict=True)
    ):
        latents = sequence_latents(batch, req)
        latent, rope = latents[:, : plan.rank], latents[:, plan.rank :]
        for position in range(kv_len - query_len, kv_len):
            seen = [sees(position, key) for key in range(kv_len)]
            for head in range(plan.heads):
                key = torch.cat([latent @ w_uk[head].T, rope], 1)[seen]
                value = (latent @ w_uv[head])[seen]
                question = torch.cat([q_nope[token, head], q_pe[token, head]])
                scores = key @ question * scale
                weights = scores.softmax(0)
                out[token, head] = weights @ value
                lse[head, token] = scores.logsumexp(0)
                size = latent.abs() @ w_uv[head].abs()
                sizes[token, head] = weights @ size[seen]
                size = latent.abs() @ (q_nope[token, head].abs() @ w_uk[head].abs())
                size = size + rope.abs() @ q_pe[token, head].abs()
                score_sizes[head, token] = size[seen].max() * scale
            token += 1
    return Truth(out, lse, sizes, score_sizes)


def run(
    twin: Twin, batch: Batch, way: str, dtype: torch.dtype | None = None, **changes: Any
) -> tuple[Tensor, Tensor]:
    """Run one twin, either way, into an output and a log-sum-exp full of NaN."""
    out, lse = batch.fresh(dtype)
    if way == "decode":
        arguments, operation = batch.decode_arguments(), twin.latent_decode_attention
    else:
        arguments, operation = batch.prefill_arguments(), twin.latent_prefill_attention
    returned = operation(**(arguments | changes), out=out, lse=lse)
    assert returned is out
    return out, lse


def judge(
    batch: Batch,
    way: str,
    out: Tensor,
    lse: Tensor,
    reference: Twin,
    truth: Truth,
    **changes: Any,
) -> tuple[Verdict, Verdict]:
    """Return the verdicts on an output and on its log-sum-exp."""
    dtype, live = batch.plan.dtype, slice(0, batch.tokens)
    assert bool((out[batch.tokens :] == 0).all())
    assert bool((lse[:, batch.tokens :] == -torch.inf).all())
    same, same_lse = run(reference, batch, way, compute_dtype=dtype, **changes)
    return (
        judge_rows(out.cpu(), truth.out, same.cpu(), dtype, truth.sizes),
        judge_rows(
            lse.T[live].cpu(),
            truth.lse.T[live],
            same_lse.T[live].cpu(),
            dtype,
            1 + truth.score_sizes.T[live],
        ),
    )


def assert_right(
    twin: Twin, reference: Twin, batch: Batch, way: str, **changes: Any
) -> None:
    """Assert that one twin's output and log-sum-exp keep their budgets."""
    out, lse = run(twin, batch, way, **changes)
    for verdict in judge(batch, way, out, lse, reference, attend(batch), **changes):
        assert verdict.ok, verdict


@st.composite
def plans(draw: st.DrawFn, max_reqs: int = 3) -> Plan:
    """Return the plan of a batch; everything comes from one seed, as in batches.py."""
    pick = Random(draw(st.integers(0, 2**20)))
    reqs = 0 if pick.random() < 0.05 else pick.randint(1, max_reqs)
    block_size = pick.choice([1, 3, 16, 16])
    batch = draw_lengths(pick, block_size, reqs)
    return Plan(
        query_lens=tuple(query_len for query_len, _ in batch),
        kv_lens=tuple(kv_len for _, kv_len in batch),
        block_size=block_size,
        heads=pick.choice([1, 2, 3, 5]),
        rank=pick.choice([16, 24, 1]),
        rope=pick.choice([8, 8, 1]),
        nope=pick.choice([16, 16, 5]),
        value=pick.choice([16, 16, 7]),
        dtype=pick.choice(DTYPES),
        cache_dtype=pick.choice([None, None, *FP8_DTYPES]),
        layout=pick.choice(LAYOUTS),
        table=pick.choice(TABLES),
        needle=pick.choice(["none", *NEEDLES]),
        needle_part=pick.choice(["latent", "rope"]),
        scale=pick.choice([None, None, 0.3]),
        padding=pick.choice([0, 0, 1, 3]),
        seed=pick.randrange(2**16),
    )


CORNERS = {
    "the widths of DeepSeek-V2": Plan(
        (1, 3), (33, 5), heads=2, rank=512, rope=64, nope=128, value=128, needle="last"
    ),
    "the widths of DeepSeek-V2, bf16, FP8 cache": Plan(
        (2,),
        (18,),
        heads=2,
        rank=512,
        rope=64,
        nope=128,
        value=128,
        dtype=torch.bfloat16,
        cache_dtype=torch.float8_e4m3fn,
    ),
    "eight heads, FP8 cache": Plan(
        (2, 1), (19, 33), heads=8, cache_dtype=torch.float8_e5m2, dtype=torch.float16
    ),
    "one head": Plan((1, 9), (40, 9), heads=1, needle="first"),
    "sixteen heads": Plan((1, 4), (40, 17), heads=16, needle="tile edge"),
    "widths of one": Plan((1, 4), (9, 6), heads=2, rank=1, rope=1, nope=1, value=1),
    "empty batch": Plan((), (), padding=2),
    "empty batch without padding": Plan((), ()),
    "no new tokens": Plan((0, 0), (5, 0)),
    "an empty request between others": Plan((3, 0, 1), (20, 0, 17), padding=1),
    "a whole prompt beside decodes": Plan((1, 37, 1), (50, 37, 2), needle="first new"),
    "a long row": Plan((1, 1), (200, 2), dtype=torch.float16, needle="tile edge"),
}


@given(
    widths=st.fixed_dictionaries(dict.fromkeys(WIDTHS, st.integers(1, 2048))),
    query=st.none() | st.fixed_dictionaries({"q_lora_rank": st.none() | st.just(7)}),
)
def test_the_widths_are_those_of_the_configuration(
    widths: dict[str, int], query: dict[str, int | None] | None, twin: Twin
) -> None:
    """A model that does not compress its queries says None, or nothing."""
    dims = twin.get_mla_dims(SimpleNamespace(**widths, **(query or {})))
    expected = {"q_lora_rank": (query or {}).get("q_lora_rank"), **widths}
    assert vars(dims) == expected
    assert dims.qk_head_dim == widths["qk_nope_head_dim"] + widths["qk_rope_head_dim"]
    assert dims.cached_width == widths["kv_lora_rank"] + widths["qk_rope_head_dim"]


@pytest.mark.parametrize("name", WIDTHS)
def test_a_width_that_is_missing_is_named(name: str, twin: Twin) -> None:
    without = {other: width for other, width in WIDTHS.items() if other != name}
    with pytest.raises(ValueError, match=f"has no {name}"):
        twin.get_mla_dims(SimpleNamespace(**without))
    with pytest.raises(ValueError, match=f"{name} = 0"):
        twin.get_mla_dims(SimpleNamespace(**WIDTHS | {name: 0}))


@pytest.mark.parametrize("way", WAYS)
@given(plan=plans())
def test_the_reference_in_float64_is_full_multi_head_attention(
    plan: Plan, way: str, reference: Twin, device: torch.device
) -> None:
    batch = build(plan, device)
    out, lse = run(reference, batch, way, torch.float64, compute_dtype=torch.float64)
    truth = attend(batch)
    assert torch.allclose(out.cpu(), truth.out, rtol=1e-11, atol=1e-11)
    assert torch.allclose(lse.cpu(), truth.lse, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("way", WAYS)
@FEWER
@given(plan=plans(), passes=st.sampled_from((1, 2, 3)))
def test_every_row_keeps_its_budget(
    plan: Plan,
    passes: int,
    way: str,
    twin: Twin,
    reference: Twin,
    device: torch.device,
) -> None:
    context = sum(plan.kv_lens) - sum(plan.query_lens)
    changes = {"max_context_chunk": context // passes + 1} if way == "prefill" else {}
    assert_right(twin, reference, build(plan, device), way, **changes)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("corner", CORNERS)
def test_the_corners_keep_their_budget(
    corner: str, way: str, twin: Twin, reference: Twin, device: torch.device
) -> None:
    assert_right(twin, reference, build(CORNERS[corner], device), way)


@pytest.mark.parametrize("part", ["latent", "rope"])
@pytest.mark.parametrize("needle", NEEDLES[1:])
@pytest.mark.parametrize("way", WAYS)
def test_a_key_that_outweighs_all_others_is_found(
    needle: str,
    part: str,
    way: str,
    twin: Twin,
    reference: Twin,
    device: torch.device,
) -> None:
    """By its latent or by its rope key; with chunks of 16 it stands at their edges too."""
    plan = Plan((1, 3), (65, 36), heads=2, needle=needle, needle_part=part)
    changes = {"max_context_chunk": 16} if way == "prefill" else {}
    assert_right(twin, reference, build(plan, device), way, **changes)


@FEWER
@given(
    kv_len=st.integers(2, 30),
    dtype=st.sampled_from(DTYPES),
    cache_dtype=st.sampled_from([None, *FP8_DTYPES]),
    needle=st.sampled_from(NEEDLES),
    data=st.data(),
)
def test_a_prompt_in_chunks_is_the_prompt_in_one(
    kv_len: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    needle: str,
    data: st.DataObject,
    twin: Twin,
    reference: Twin,
    device: torch.device,
) -> None:
    """However it is cut, and whichever way each piece takes."""
    plan = Plan((kv_len,), (kv_len,), dtype=dtype, cache_dtype=cache_dtype)
    batch = build(replace(plan, needle=needle), device)
    cuts = data.draw(st.sets(st.integers(1, kv_len - 1), max_size=2))
    out, lse = batch.fresh()
    ways = []
    for begin, end in itertools.pairwise([0, *sorted(cuts), kv_len]):
        rows = slice(begin, end)
        piece = replace(
            batch,
            plan=replace(plan, query_lens=(end - begin,), kv_lens=(end,)),
            q_nope=batch.q_nope[rows],
            q_pe=batch.q_pe[rows],
            kv_c=batch.kv_c[rows],
            k_pe=batch.k_pe[rows],
            query_start_loc=torch.tensor([0, end - begin], device=device).int(),
            seq_lens=torch.tensor([end], device=device).int(),
        )
        ways.append(data.draw(st.sampled_from(WAYS)))
        out[rows], lse[:, rows] = run(twin, piece, ways[-1])
    truth = attend(batch)
    for verdict in judge(batch, "prefill", out, lse, reference, truth):
        assert verdict.ok, f"cuts {cuts}, {ways}: {verdict}"


def test_token_by_token_is_the_prompt_in_one(
    twin: Twin, reference: Twin, device: torch.device
) -> None:
    """Every token is written, then attends to all before it; the prompt never is in the cache."""
    kv_len = 19
    prompt = build(Plan((kv_len,), (kv_len,), needle="block edge"), device)
    cache = torch.full_like(prompt.kv_cache, NAN)
    written = replace(prompt, kv_cache=cache)
    out, lse = prompt.fresh()
    for position in range(kv_len):
        own = slice(position, position + 1)
        slot = prompt.rows[0][position // 16] * 16 + position % 16
        twin.concat_and_cache_mla(
            prompt.kv_c[own], prompt.k_pe[own], cache, torch.tensor([slot]).to(device)
        )
        step = replace(
            written,
            plan=replace(prompt.plan, query_lens=(1,), kv_lens=(position + 1,)),
            q_nope=prompt.q_nope[own],
            q_pe=prompt.q_pe[own],
            query_start_loc=torch.tensor([0, 1], device=device).int(),
            seq_lens=torch.tensor([position + 1], device=device).int(),
        )
        out[own], lse[:, own] = run(twin, step, "decode")
    assert same_bits(cache, prompt.kv_cache)
    empty = replace(prompt, kv_cache=torch.full_like(cache, NAN))
    whole, whole_lse = run(twin, empty, "prefill")
    truth = attend(prompt)
    for pair in ((out, lse), (whole, whole_lse)):
        for verdict in judge(prompt, "prefill", *pair, reference, truth):
            assert verdict.ok, verdict


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("poison", [0.0, float("inf"), 1e4])
def test_what_nobody_owns_never_shows(
    way: str, poison: float, twin: Twin, device: torch.device
) -> None:
    """NaN or anything else in unowned slots, table tails and padding: not a bit changes."""
    plan = Plan((3, 1, 0), (20, 9, 4), layout="padded", padding=2, needle="last")
    batch = build(plan, device)
    before = run(twin, batch, way)
    table = batch.block_table.clone()
    for req, row in enumerate(batch.rows):
        table[req, len(row) :] = 0
    changes = {"block_table": table}
    for name in ("q_nope", "q_pe", "kv_c", "k_pe", "kv_cache"):
        if name in ("kv_c", "k_pe") and way == "decode":
            continue
        tensor = getattr(batch, name)
        changes[name] = torch.where(tensor.isnan(), poison, tensor)
    for one, other in zip(before, run(twin, batch, way, **changes), strict=True):
        assert same_bits(one, other)


def test_a_prefill_does_not_read_the_new_tokens_slots(
    twin: Twin, device: torch.device
) -> None:
    batch = build(Plan((3, 5), (20, 5)), device)
    before = run(twin, batch, "prefill")
    cache = batch.kv_cache.clone()
    for row, query_len, kv_len in zip(batch.rows, (3, 5), (20, 5), strict=True):
        for position in range(kv_len - query_len, kv_len):
            cache[row[position // 16], position % 16] = NAN
    for one, other in zip(
        before, run(twin, batch, "prefill", kv_cache=cache), strict=True
    ):
        assert same_bits(one, other)


@pytest.mark.parametrize("chunk", [1, 4, 9, 1000])
def test_the_context_may_be_read_in_chunks_of_any_length(
    chunk: int, twin: Twin, reference: Twin, device: torch.device
) -> None:
    """Chunks run over the requests' contexts as one line, so they end in the middle of both."""
    plan = Plan((2, 1, 2, 0), (8, 4, 2, 2), 3, heads=2, needle="first", padding=1)
    assert_right(
        twin, reference, build(plan, device), "prefill", max_context_chunk=chunk
    )


def test_the_number_of_context_tokens_may_lie_above_the_truth(
    twin: Twin, device: torch.device
) -> None:
    batch = build(Plan((3, 1), (20, 9)), device)
    before = run(twin, batch, "prefill")
    for spare, chunk in ((7, None), (40, 16)):
        after = run(
            twin,
            batch,
            "prefill",
            num_context_tokens=25 + spare,
            max_context_chunk=chunk,
        )
        for one, other in zip(before, after, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_many_chunks_lose_no_more_than_one(
    twin: Twin, reference: Twin, device: torch.device
) -> None:
    """Rounded to 16 bits at every join, the total once would have been."""
    plan = Plan((2,), (34,), heads=2, dtype=torch.bfloat16)
    batch = build(plan, device)
    out, lse = run(twin, batch, "prefill", max_context_chunk=2)
    for verdict in judge(batch, "prefill", out, lse, reference, attend(batch)):
        assert verdict.ok, verdict


@pytest.mark.parametrize("window", [1, 4, 16, 17])
def test_a_window_hides_all_but_the_last_keys(
    window: int, twin: Twin, reference: Twin, device: torch.device
) -> None:
    batch = build(Plan((1, 3, 9), (40, 17, 9), heads=2), device)
    truth = attend(batch, lambda position, key: position - window < key <= position)
    changes = {"sliding_window": window}
    out, lse = run(twin, batch, "decode", **changes)
    for verdict in judge(batch, "decode", out, lse, reference, truth, **changes):
        assert verdict.ok, verdict


@pytest.mark.parametrize("way", WAYS)
def test_the_scale_defaults_to_the_width_of_a_heads_key(
    way: str, twin: Twin, device: torch.device
) -> None:
    """Not to that of what is cached, which is what attention to the latents sees as a head."""
    batch = build(Plan((3, 1), (20, 9), rank=24, nope=12, rope=4), device)
    out, _ = run(twin, batch, way)
    assert same_bits(out, run(twin, batch, way, scale=0.25)[0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_scale_of_an_fp8_cache_may_lie_on_the_device(
    shape: tuple[int, ...], way: str, twin: Twin, device: torch.device
) -> None:
    plan = Plan((3, 1), (20, 9), cache_dtype=torch.float8_e4m3fn, k_scale=0.25)
    batch = build(plan, device)
    on_device = torch.full(shape, 0.25, device=device)
    before, after = run(twin, batch, way), run(twin, batch, way, k_scale=on_device)
    for one, other in zip(before, after, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("way", WAYS)
def test_the_inputs_stay_as_they_are(
    way: str, twin: Twin, device: torch.device
) -> None:
    batch = build(Plan((3, 1), (20, 9), padding=1), device)
    before = {name: each.clone() for name, each in batch.tensors().items()}
    run(twin, batch, way)
    for name, tensor in batch.tensors().items():
        assert same_bits(before[name], tensor), name


@pytest.mark.parametrize("way", WAYS)
def test_every_argument_changes_something(
    way: str, twin: Twin, device: torch.device
) -> None:
    batch = build(Plan((3, 2), (20, 20)), device)
    before, before_lse = run(twin, batch, way)
    names = ["q_nope", "q_pe", "kv_cache", "w_uk", "w_uv"]
    names += ["kv_c", "k_pe"] if way == "prefill" else []
    changes = {name: {name: getattr(batch, name) * 2} for name in names}
    changes["scale"] = {"scale": 0.9}
    changes["block_table"] = {"block_table": batch.block_table.flip(0)}
    changes["seq_lens"] = {"seq_lens": batch.seq_lens - 1}
    changes["query_start_loc"] = {
        "query_start_loc": torch.tensor([0, 2, 5], device=device).int()
    }
    for name, change in changes.items():
        out, lse = run(twin, batch, way, **change)
        assert not torch.allclose(out, before, atol=1e-3), name
        if name != "w_uv":
            assert not torch.allclose(lse, before_lse, atol=1e-3), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_output_is_made_where_none_is_given(
    dtype: torch.dtype, way: str, twin: Twin, device: torch.device
) -> None:
    batch = build(Plan((3, 1), (20, 9), padding=2, dtype=dtype), device)
    if way == "decode":
        out = twin.latent_decode_attention(**batch.decode_arguments())
    else:
        out = twin.latent_prefill_attention(**batch.prefill_arguments())
    assert out.dtype == dtype and out.device == batch.q_nope.device
    assert same_bits(out, run(twin, batch, way)[0])


@pytest.mark.parametrize("way", WAYS)
def test_an_output_may_be_a_view_of_another_dtype(
    way: str, twin: Twin, device: torch.device
) -> None:
    plan = Plan((3, 1), (20, 9), padding=1, dtype=torch.bfloat16)
    batch = build(plan, device)
    arguments = batch.decode_arguments()
    operation = twin.latent_decode_attention
    if way == "prefill":
        arguments = batch.prefill_arguments()
        operation = twin.latent_prefill_attention
    rounded = run(twin, batch, way)[0]
    for dtype in (torch.bfloat16, torch.float32):
        wide = torch.full((5, 3, 32), NAN, dtype=dtype, device=device)
        operation(**arguments, out=wide[..., ::2])
        assert same_bits(wide[..., ::2].bfloat16(), rounded)
        assert bool(wide[..., 1::2].isnan().all())


@pytest.mark.parametrize("way", WAYS)
def test_weights_may_want_a_gradient_and_be_views(
    way: str, twin: Twin, device: torch.device
) -> None:
    """A model's weights are parameters, and slices of one projection."""
    batch = build(Plan((3, 1), (20, 9)), device)
    fused = torch.cat([batch.w_uk.transpose(1, 2), batch.w_uv], 2).requires_grad_()
    changes = {"w_uk": fused[..., :16].transpose(1, 2), "w_uv": fused[..., 16:]}
    with torch.no_grad():
        quiet = run(twin, batch, way, **changes)
    for one, other in zip(run(twin, batch, way), quiet, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


BROKEN: dict[str, Callable[[Batch], Truth]] = {
    "drops the last key": lambda batch: attend(batch, lambda p, key: key < max(p, 1)),
    "drops the first key": lambda batch: attend(batch, lambda p, key: 0 < key <= p),
    "sees one key too many": lambda batch: attend(batch, lambda p, key: key <= p + 1),
    "forgets the rope": lambda batch: attend(
        replace(batch, q_pe=torch.zeros_like(batch.q_pe))
    ),
    "mixes up the heads": lambda batch: attend(replace(batch, w_uk=batch.w_uk.flip(0))),
    "scales by the latent's width": lambda batch: attend(
        replace(batch, plan=replace(batch.plan, scale=24**-0.5))
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_judge_rejects_attention_that(fault: str, reference: Twin) -> None:
    needle = {"drops the first key": "first"}.get(fault, "none")
    batch = build(Plan((3, 2), (40, 19), nope=8, rope=4, rank=20, needle=needle))
    truth = attend(batch)
    same = run(reference, batch, "decode")
    verdicts = judge(batch, "decode", truth.out, truth.lse, reference, truth)
    assert all(verdict.ok for verdict in verdicts)
    assert all(
        verdict.ok for verdict in judge(batch, "decode", *same, reference, truth)
    )
    wrong = BROKEN[fault](batch)
    verdicts = judge(batch, "decode", wrong.out, wrong.lse, reference, truth)
    assert not any(verdict.ok for verdict in verdicts)


class NothingIsRead(TorchDispatchMode):
    """Refuse what brings a number from the device to the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert "_local_scalar_dense" not in str(func), "the host waits for a number"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", WAYS)
def test_the_host_reads_nothing(way: str, device: torch.device) -> None:
    twin = Twin("optimized").raw
    plan = Plan((3, 1), (20, 9), cache_dtype=torch.float8_e4m3fn)
    batch = build(plan, device)
    scale = torch.tensor(0.5, device=device)
    with NothingIsRead():
        run(twin, batch, way, k_scale=scale)
        slots = torch.full((4,), -1, dtype=torch.int64, device=device)
        twin.concat_and_cache_mla(batch.kv_c, batch.k_pe, batch.kv_cache, slots, scale)


def write_expected(
    kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: list[int], scale: float | None
) -> Tensor:
    """Return the cache after a write, element by element on the host."""
    expected = cache.cpu().clone()
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        numbers = [*kv_c[token].cpu(), *k_pe[token].cpu()]
        for element, number in enumerate(numbers):
            if scale is not None:
                largest = torch.finfo(cache.dtype).max
                number = number.float() / torch.tensor(scale)
                number = number.clamp(-largest, largest)
            place = slot // cache.shape[1], slot % cache.shape[1], element
            expected[place] = number.to(cache.dtype)
    return expected


@FEWER
@given(
    rank=st.sampled_from((1, 16, 24, 100)),
    rope=st.sampled_from((1, 8, 30)),
    tokens=st.integers(0, 20),
    padding=st.integers(0, 2),
    dtype=st.sampled_from((*DTYPES, torch.float64)),
    cache_dtype=st.sampled_from([None, *FP8_DTYPES]),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**16),
)
def test_every_latent_is_written_to_its_slot_and_nothing_else_changes(
    rank: int,
    rope: int,
    tokens: int,
    padding: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    layout: str,
    seed: int,
    twin: Twin,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    plan = Plan((), (), 3, rank=rank, rope=rope, dtype=dtype, layout=layout)
    cache = empty_cache(replace(plan, cache_dtype=cache_dtype), 9).to(device)
    fused = torch.randn(tokens + padding, rank + rope + 2, generator=generator)
    fused = (fused * 2 ** torch.randint(-12, 12, fused.shape, generator=generator)).to(
        device, dtype
    )
    kv_c, k_pe = fused[:, 1 : rank + 1], fused[:, rank + 1 : rank + rope + 1]
    slots = torch.randperm(27, generator=generator)[:tokens].tolist()
    slots = [slot if slot % 4 else -1 for slot in slots]
    scale = None if cache_dtype is None else 0.37
    expected = write_expected(kv_c, k_pe, cache, slots, scale)
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    twin.concat_and_cache_mla(kv_c, k_pe, cache, slot_mapping, scale)
    assert same_bits(cache.cpu(), expected)


@pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_twins_write_the_same_bytes(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    twin: Twin,
    reference: Twin,
    device: torch.device,
) -> None:
    """Every number of 16 bits, NaN and infinity among them, is rounded and saturated alike."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    numbers = numbers.view(torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
    numbers = numbers.to(dtype).view(256, 256).to(device)
    slots = torch.arange(256, device=device)
    written = []
    for each in (twin, reference):
        cache = torch.zeros(16, 16, 256, device=device).to(cache_dtype)
        scale = torch.tensor([0.3], device=device)
        each.concat_and_cache_mla(
            numbers[:, :200], numbers[:, 200:], cache, slots, scale
        )
        written.append(bits(cache))
    assert torch.equal(*written)


def test_blocks_past_two_billion_elements_are_found(
    twin: Twin, device: torch.device
) -> None:
    """block id * block stride passes 2**31 here; in 32 bits it wraps to memory before the cache."""
    small = build(Plan((2, 1), (33, 20), dtype=torch.float16), device)
    width = small.kv_cache.shape[2]
    num_blocks = 2**31 // (16 * width) + 70
    # nothing is touched but the pages that are used, so this costs addresses and no memory
    cache = torch.empty(num_blocks, 16, width, dtype=torch.float16, device=device)
    table = small.block_table.clone()
    high = num_blocks - 1
    for req, row in enumerate(small.rows):
        for entry, block_id in enumerate(row):
            table[req, entry] = high
            latents = small.kv_cache[block_id]
            slots = torch.arange(16, device=device) + high * 16
            twin.concat_and_cache_mla(latents[:, :16], latents[:, 16:], cache, slots)
            assert same_bits(cache[high], latents)
            high -= 1
    assert high * 16 * width > 2**31
    for way in WAYS:
        far = run(twin, small, way, kv_cache=cache, block_table=table)
        for one, other in zip(run(twin, small, way), far, strict=True):
            assert same_bits(one, other)


def test_lengths_and_starts_may_be_views_with_any_strides(
    twin: Twin, device: torch.device
) -> None:
    batch = build(Plan((3, 1), (20, 9)), device)
    changes = {}
    for name in ("query_start_loc", "seq_lens", "block_table"):
        wide = getattr(batch, name).repeat_interleave(2, dim=-1).clone()
        wide[..., 1::2] = 10**6
        changes[name] = wide[..., ::2]
    for way in WAYS:
        for one, other in zip(
            run(twin, batch, way), run(twin, batch, way, **changes), strict=True
        ):
            assert same_bits(one, other)


REFUSED_WRITES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a cache of four axes": (
        {"kv_cache": torch.zeros(3, 4, 1, 24)},
        ValueError,
        "kv_cache has shape [3, 4, 1, 24]: expected [num_blocks, block_size,",
    ),
    "a cache of integers": (
        {"kv_cache": torch.zeros(3, 4, 24, dtype=torch.int32)},
        TypeError,
        "kv_cache is torch.int32",
    ),
    "a cache too narrow": (
        {"kv_cache": torch.zeros(3, 4, 16)},
        ValueError,
        "kv_cache keeps 16 elements a token: expected 24, kv_lora_rank = 16 and"
        " qk_rope_head_dim = 8",
    ),
    "a cache of another dtype": (
        {"kv_cache": torch.zeros(3, 4, 24).half()},
        TypeError,
        "kv_c is torch.float32: expected torch.float16",
    ),
    "two dtypes": (
        {"k_pe": torch.zeros(3, 8).half()},
        TypeError,
        "k_pe is torch.float16: expected torch.float32",
    ),
    "latents of three axes": (
        {"kv_c": torch.zeros(3, 1, 16)},
        ValueError,
        "kv_c has shape [3, 1, 16] and k_pe [3, 8]",
    ),
    "other tokens": ({"k_pe": torch.zeros(2, 8)}, ValueError, "and k_pe [2, 8]"),
    "FP8 without a scale": (
        {"kv_cache": torch.zeros(3, 4, 24).to(torch.float8_e5m2)},
        ValueError,
        "scale = None: expected a scale, as kv_cache is torch.float8_e5m2",
    ),
    "FP8 into FP8": (
        {
            "kv_cache": torch.zeros(3, 4, 24).to(torch.float8_e5m2),
            "kv_c": torch.zeros(3, 16).to(torch.float8_e5m2),
            "scale": 1.0,
        },
        TypeError,
        "kv_c is torch.float8_e5m2",
    ),
    "a scale without FP8": (
        {"scale": 1.0},
        ValueError,
        "scale is given but kv_cache is torch.float32: expected None",
    ),
    "a scale of zero": (
        {"kv_cache": torch.zeros(3, 4, 24).to(torch.float8_e5m2), "scale": 0.0},
        ValueError,
        "scale = 0.0: expected a finite number above 0",
    ),
    "a scale a head": (
        {
            "kv_cache": torch.zeros(3, 4, 24).to(torch.float8_e5m2),
            "scale": torch.ones(2),
        },
        ValueError,
        "scale has shape [2]: expected [] or [1]",
    ),
    "slots of another dtype": (
        {"slot_mapping": torch.zeros(3, dtype=torch.int32)},
        TypeError,
        "slot_mapping is torch.int32: expected torch.int64",
    ),
    "more slots than tokens": (
        {"slot_mapping": torch.arange(4)},
        ValueError,
        "slot_mapping has shape [4]: expected at most [3], the tokens of kv_c and k_pe",
    ),
    "another device": (
        {"kv_c": torch.zeros(3, 16, device="meta")},
        ValueError,
        "kv_c lies on meta",
    ),
    "a slot outside": (
        {"slot_mapping": torch.tensor([0, 12])},
        IndexError,
        "slot_mapping[1] = 12 is outside the cache",
    ),
    "two tokens for one slot": (
        {"slot_mapping": torch.tensor([7, -1, 7])},
        ValueError,
        "slot_mapping[2] = 7 is also slot_mapping[0]",
    ),
}


def on(device: torch.device, changes: dict[str, Any]) -> dict[str, Any]:
    """Return arguments whose tensors lie on a device, but for those that lie nowhere."""
    return {
        name: each.to(device)
        if isinstance(each, Tensor) and each.device.type != "meta"
        else each
        for name, each in changes.items()
    }


@pytest.mark.usefixtures("checked_values")
@pytest.mark.parametrize("case", REFUSED_WRITES)
def test_a_write_is_refused_that_brings(
    case: str, twin: Twin, device: torch.device
) -> None:
    changes, error, words = REFUSED_WRITES[case]
    arguments = {
        "kv_c": torch.ones(3, 16),
        "k_pe": torch.ones(3, 8),
        "kv_cache": torch.zeros(3, 4, 24),
        "slot_mapping": torch.tensor([5, -1, 7]),
    }
    arguments = on(device, arguments | changes)
    with pytest.raises(error) as caught:
        twin.raw.concat_and_cache_mla(**arguments)
    assert words in str(caught.value)
    assert not bool(arguments["kv_cache"].float().any())


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "other heads for the rope query": (
        {"q_pe": torch.zeros(4, 2, 8)},
        ValueError,
        "q_nope has shape [4, 3, 16] and q_pe [4, 2, 8]",
    ),
    "queries of two axes": ({"q_nope": torch.zeros(4, 48)}, ValueError, "[4, 48]"),
    "a rope query of another dtype": (
        {"q_pe": torch.zeros(4, 3, 8).half()},
        TypeError,
        "q_pe is torch.float16: expected torch.float32",
    ),
    "queries of another dtype than the cache": (
        {"kv_cache": torch.zeros(9, 16, 24).half()},
        TypeError,
        "q_nope is torch.float32: expected torch.float16",
    ),
    "key weights of the cache's width": (
        {"w_uk": torch.zeros(3, 16, 24)},
        ValueError,
        "w_uv has shape [3, 16, 12]: expected [3, 24, v_head_dim]",
    ),
    "key weights turned round": (
        {"w_uk": torch.zeros(3, 17, 16)},
        ValueError,
        "w_uk has shape [3, 17, 16]: expected [3, 16, kv_lora_rank], heads and width of"
        " q_nope",
    ),
    "value weights of other heads": (
        {"w_uv": torch.zeros(2, 16, 12)},
        ValueError,
        "w_uv has shape [2, 16, 12]: expected [3, 16, v_head_dim]",
    ),
    "weights of another dtype": (
        {"w_uv": torch.zeros(3, 16, 12).half()},
        TypeError,
        "w_uv is torch.float16: expected torch.float32",
    ),
    "a value of no elements": (
        {"w_uv": torch.zeros(3, 16, 0)},
        ValueError,
        "v_head_dim = 0: expected at least 1",
    ),
    "a cache too wide": (
        {"kv_cache": torch.zeros(9, 16, 25)},
        ValueError,
        "kv_cache keeps 25 elements a token: expected 24",
    ),
    "FP8 without a scale": (
        {"kv_cache": torch.zeros(9, 16, 24).to(torch.float8_e4m3fn)},
        ValueError,
        "k_scale = None: expected a scale",
    ),
    "a scale without FP8": ({"k_scale": 1.0}, ValueError, "k_scale is given but"),
    "an output of the latent's width": (
        {"out": torch.zeros(4, 3, 16)},
        ValueError,
        "out has shape [4, 3, 16]: expected [4, 3, 12], queries by v_head_dim",
    ),
    "an FP8 output": (
        {"out": torch.zeros(4, 3, 12).to(torch.float8_e4m3fn)},
        TypeError,
        "out is torch.float8_e4m3fn",
    ),
    "a log-sum-exp turned round": (
        {"lse": torch.zeros(4, 3)},
        ValueError,
        "lse has shape [4, 3]: expected [3, 4]",
    ),
    "a log-sum-exp of 16 bits": (
        {"lse": torch.zeros(3, 4).half()},
        TypeError,
        "lse is torch.float16",
    ),
    "weights on another device": (
        {"w_uk": torch.zeros(3, 16, 16, device="meta")},
        ValueError,
        "w_uk lies on meta",
    ),
    "a table of one axis": (
        {"block_table": torch.zeros(2, dtype=torch.int32)},
        ValueError,
        "block_table has shape [2]",
    ),
    "lengths of another dtype": (
        {"seq_lens": torch.tensor([20, 9])},
        TypeError,
        "seq_lens is torch.int64",
    ),
    "lengths of other requests": (
        {"seq_lens": torch.tensor([20]).int()},
        ValueError,
        "seq_lens has shape [1]: expected [2]",
    ),
    "a bound past the table": (
        {"max_seq_len": 1000},
        IndexError,
        "max_seq_len = 1000: expected at most 48",
    ),
    "a negative bound": ({"max_query_len": -1}, ValueError, "max_query_len = -1"),
    "starts past the tokens": (
        {"query_start_loc": torch.tensor([0, 3, 5]).int()},
        ValueError,
        "query_start_loc[2] = 5: expected at most 4",
    ),
    "more queries than keys": (
        {"seq_lens": torch.tensor([2, 9]).int()},
        ValueError,
        "request 0 has 3 queries on 2 keys and is causal",
    ),
    "a block that the cache does not have": (
        {"block_table": torch.full((2, 3), 99).int()},
        IndexError,
        "block_table[0, 0] = 99 is outside the cache",
    ),
    "a bound below a query length": (
        {"max_query_len": 2},
        ValueError,
        "request 0 has 3 new tokens: expected at most max_query_len = 2",
    ),
    "a bound below a length": (
        {"max_seq_len": 19},
        ValueError,
        "seq_lens[0] = 20: expected at most max_seq_len = 19",
    ),
}
REFUSED_DECODES = {
    "a window of no keys": (
        {"sliding_window": 0},
        ValueError,
        "sliding_window = 0: expected at least 1",
    )
}
REFUSED_PREFILLS = {
    "latents too narrow": (
        {"kv_c": torch.zeros(4, 15)},
        ValueError,
        "kv_c has shape [4, 15]: expected [4, 16]",
    ),
    "rope keys of each head": (
        {"k_pe": torch.zeros(4, 3, 8)},
        ValueError,
        "k_pe [4, 3, 8]: expected [tokens, kv_lora_rank] and [tokens, qk_rope_head_dim]",
    ),
    "latents of other tokens": (
        {"kv_c": torch.zeros(29, 16), "k_pe": torch.zeros(29, 8)},
        ValueError,
        "kv_c has shape [29, 16]: expected [4, 16], as many tokens as queries",
    ),
    "latents of another dtype": (
        {"kv_c": torch.zeros(4, 16).half()},
        TypeError,
        "kv_c is torch.float16",
    ),
    "fewer context tokens than there are": (
        {"num_context_tokens": 24},
        ValueError,
        "num_context_tokens = 24: expected at least 25",
    ),
    "a negative number of context tokens": (
        {"num_context_tokens": -1},
        ValueError,
        "num_context_tokens = -1: expected at least 0",
    ),
    "chunks of nothing": (
        {"max_context_chunk": 0},
        ValueError,
        "max_context_chunk = 0: expected at least 1",
    ),
}
CASES = {
    "decode": REFUSED | REFUSED_DECODES,
    "prefill": REFUSED | REFUSED_PREFILLS,
}


@pytest.mark.usefixtures("checked_values")
@pytest.mark.parametrize(
    ("way", "case"), [(way, case) for way, cases in CASES.items() for case in cases]
)
def test_attention_is_refused_that_is_given(
    way: str, case: str, twin: Twin, device: torch.device
) -> None:
    changes, error, words = CASES[way][case]
    batch = build(Plan((3, 1), (20, 9), value=12), device)
    arguments, operation = batch.decode_arguments(), twin.raw.latent_decode_attention
    if way == "prefill":
        arguments = batch.prefill_arguments()
        operation = twin.raw.latent_prefill_attention
    out = torch.full((4, 3, 12), 7.0, device=device)
    with pytest.raises(error) as caught:
        operation(**(arguments | {"out": out} | on(device, changes)))
    assert words in str(caught.value)
    assert bool((out == 7).all())


def test_what_the_kernels_do_not_compute_is_left_to_the_reference(
    device: torch.device,
) -> None:
    twin = Twin("optimized").raw
    for dtype, words in (
        (torch.float32, "compute_dtype = torch.float64"),
        (torch.float64, "torch.float64"),
    ):
        batch = build(Plan((3,), (20,), dtype=dtype), device)
        for way in WAYS:
            with pytest.raises(NotImplementedError, match=words):
                run(twin, batch, way, compute_dtype=torch.float64)
