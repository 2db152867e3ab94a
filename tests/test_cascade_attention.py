"""Is attention the same when the prefix that all requests share is read only once?"""

from dataclasses import replace
from importlib import import_module
from inspect import unwrap
from random import Random
from typing import Any

import pytest
import torch
from conftest import TWINS, Twin
from hypothesis import given, settings
from hypothesis import strategies as st
from pagetwin.conformance.generators.batches import (
    DTYPES,
    GARBAGE,
    LAYOUTS,
    Batch,
    Plan,
    build,
)
from pagetwin.conformance.oracles.dense import judge_lse, same_bits
from pagetwin.contract.attention_options import pack_options
from pagetwin.contract.budgets import judge_rows
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

FEWER = settings(max_examples=min(20, settings().max_examples))


def share_prefix(batch: Batch, prefix_len: int) -> Batch:
    """Return the batch with row 0's first blocks in the rows of all that have new tokens."""
    entries = prefix_len // batch.plan.block_size
    rows, table = [list(row) for row in batch.rows], batch.block_table.clone()
    for req, query_len in enumerate(batch.plan.query_lens):
        if query_len:
            rows[req][:entries] = rows[0][:entries]
            table[req, :entries] = table[0, :entries]
    return replace(batch, rows=rows, block_table=table)


def move_needle(batch: Batch, position: int) -> None:
    """Put the needle of every sequence, built at position 0, somewhere else in it."""
    block_size = batch.plan.block_size
    first = batch.rows[0][0]
    needle = batch.key_cache[first, 0].clone()
    generator = torch.Generator().manual_seed(7)
    for cache in (batch.key_cache, batch.value_cache):
        cache[first, 0] = torch.randn(needle.shape, generator=generator).to(cache)
    for row, query_len in zip(batch.rows, batch.plan.query_lens, strict=True):
        if query_len:
            place = row[position // block_size], position % block_size
            batch.key_cache[place] = needle
            batch.value_cache[place] += 3


def draw_batch(seed: int, device: torch.device) -> tuple[Batch, int]:
    """Return a ragged batch, idle requests and padding beside live ones, and its prefix."""
    pick = Random(seed)
    block_size = pick.choice([1, 3, 16, 16, 24])
    prefix_len = pick.randint(1, 3) * block_size
    query_lens, kv_lens = [], []
    for req in range(pick.randint(1, 4)):
        query_len = pick.choice([0, 1, 1, 1, 2, 5, 17])
        own = pick.choice([0, 0, 1, block_size - 1, block_size, 33])
        idle = [own, prefix_len] if req else [prefix_len + own]
        live = prefix_len + own + query_len
        query_lens.append(query_len)
        kv_lens.append(live if query_len else pick.choice(idle))
    for _ in range(pick.choice([0, 0, 1, 2])):
        query_lens.append(0)
        kv_lens.append(0)
    plan = Plan(
        tuple(query_lens),
        tuple(kv_lens),
        block_size=block_size,
        kv_heads=pick.choice([1, 2]),
        group=pick.choice([1, 2, 5]),
        head_size=pick.choice([8, 16, 24]),
        dtype=pick.choice(DTYPES),
        layout=pick.choice(LAYOUTS),
        spare_blocks=pick.choice([0, 2]),
        padding=pick.choice([0, 2]),
        scale=pick.choice([None, 0.3]),
        spare_max=pick.choice([0, 7]),
        seed=seed,
    )
    return share_prefix(build(plan, device), prefix_len), prefix_len


def assert_right(
    twin: Twin, reference: Twin, batch: Batch, prefix_len: int, **options: Any
) -> None:
    """Assert that one twin keeps the budgets of the reference without a shared prefix."""
    arguments = batch.arguments() | options
    dtype = batch.plan.dtype
    out, lse = batch.fresh()
    returned = twin.cascade_attention(
        common_prefix_len=prefix_len, out=out, lse=lse, **pack_options(**arguments)
    )
    assert returned is out
    exact, exact_lse = batch.fresh(torch.float64)
    reference.paged_attention(
        out=exact,
        lse=exact_lse,
        compute_dtype=torch.float64,
        **pack_options(**arguments),
    )
    same = reference.paged_attention(compute_dtype=dtype, **pack_options(**arguments))
    sizes = torch.empty_like(exact)
    values = batch.value_cache
    reference.paged_attention(
        out=sizes,
        compute_dtype=torch.float64,
        **pack_options(
            **arguments | {"value_cache": values.float().abs().to(values.dtype)}
        ),
    )
    verdict = judge_rows(out, exact, same, dtype, sizes)
    assert verdict.ok, verdict
    share = judge_lse(batch, lse, exact_lse)
    assert share <= 1, f"log-sum-exp: {share:.2f} of its budget"


@FEWER
@given(seed=st.integers(0, 2**16))
def test_every_row_keeps_its_budget(
    seed: int, twin: Twin, reference: Twin, device: torch.device
) -> None:
    assert_right(twin, reference, *draw_batch(seed, device))


@pytest.mark.parametrize("position", [0, 31, 32, 47])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_key_that_outweighs_all_others_is_found_on_both_sides_of_the_prefix_end(
    position: int, dtype: torch.dtype, twin: Twin, reference: Twin, device: torch.device
) -> None:
    """Position 31 is the last one of the prefix, 47 a new token that some must not see."""
    plan = Plan((3, 1, 20), (49, 48, 66), kv_heads=1, dtype=dtype, needle="first")
    batch = share_prefix(build(plan, device), 32)
    move_needle(batch, position)
    assert_right(twin, reference, batch, 32)


@pytest.mark.parametrize(
    "name", ["soft cap", "sinks", "not causal", "causal by request", "trees"]
)
def test_options_mean_the_same_as_without_a_shared_prefix(
    name: str, twin: Twin, reference: Twin, device: torch.device
) -> None:
    """Sinks once took weight in both parts, and so twice."""
    plan = Plan((3, 1, 4), (40, 33, 36), kv_heads=2, padding=2)
    batch = share_prefix(build(plan, device), 32)
    tree = torch.ones(3, 4, 4, dtype=torch.bool).tril()
    tree[2, 2, 1] = tree[2, 3, 2] = False  # siblings: 1 and 2 behind 0, 3 behind 1
    options: dict[str, dict[str, Any]] = {
        "soft cap": {"logits_soft_cap": 1.5},
        "sinks": {"sinks": torch.tensor([-9.0, 0.0, 2.0, 5.0], device=device)},
        "not causal": {"causal": False},
        "causal by request": {
            "causal": torch.tensor([True, False, False], device=device)
        },
        "trees": {"tree_mask": tree.to(device)},
    }
    assert_right(twin, reference, batch, 32, **options[name])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_quantised_cache_is_read_with_its_scales(
    dtype: torch.dtype, twin: Twin, reference: Twin, device: torch.device
) -> None:
    batch = share_prefix(build(Plan((2, 1), (40, 33)), device), 32)
    caches = [
        cache.contiguous().to(dtype) for cache in (batch.key_cache, batch.value_cache)
    ]
    quantised = replace(batch, key_cache=caches[0], value_cache=caches[1])
    scales = {"k_scale": torch.tensor([0.5, 0.75], device=device), "v_scale": 2.0}
    assert_right(twin, reference, quantised, 32, **scales)


def test_values_may_have_another_size_than_keys(
    twin: Twin, reference: Twin, device: torch.device
) -> None:
    batch = share_prefix(build(Plan((2, 1), (20, 17)), device), 16)
    narrow = batch.arguments() | {"value_cache": batch.value_cache[..., :5]}
    found = twin.cascade_attention(common_prefix_len=16, **pack_options(**narrow))
    assert tuple(found.shape) == (3, 4, 5)
    same = reference.paged_attention(**pack_options(**narrow))
    exact = reference.paged_attention(
        out=found.double(), compute_dtype=torch.float64, **pack_options(**narrow)
    )
    assert judge_rows(found, exact, same, torch.float32).ok


def test_no_prefix_is_plain_paged_attention(twin: Twin, device: torch.device) -> None:
    batch = build(Plan((3, 1), (20, 9), padding=2), device)
    (out, lse), (other, other_lse) = batch.fresh(), batch.fresh()
    twin.paged_attention(**batch.arguments(), out=out, lse=lse)
    twin.cascade_attention(
        **batch.arguments(), common_prefix_len=0, out=other, lse=other_lse
    )
    assert same_bits(out, other) and same_bits(lse, other_lse)


@pytest.mark.parametrize("prefix_len", [0, 16])
def test_a_batch_without_requests_gives_zero(
    prefix_len: int, twin: Twin, device: torch.device
) -> None:
    batch = build(Plan((), (), padding=3), device)
    out, lse = batch.fresh()
    twin.cascade_attention(
        **batch.arguments(), common_prefix_len=prefix_len, out=out, lse=lse
    )
    assert not out.any() and bool((lse == -torch.inf).all())


@pytest.mark.usefixtures("checked_values")
def test_a_request_without_new_tokens_may_be_shorter_than_the_prefix(
    twin: Twin, reference: Twin, device: torch.device
) -> None:
    """Padding beside live requests once got a negative length."""
    plan = Plan((2, 0, 1, 0), (40, 5, 33, 0), padding=1)
    assert_right(twin, reference, share_prefix(build(plan, device), 32), 32)


def test_the_prefix_is_read_through_row_0_alone(device: torch.device) -> None:
    """The twin believes that rows begin alike, so what stands in the others is never read."""
    twin = TWINS["optimized"]
    batch = share_prefix(build(Plan((1, 3, 1), (40, 50, 33)), device), 32)
    before = twin.cascade_attention(**batch.arguments(), common_prefix_len=32)
    garbage = torch.tensor(GARBAGE[:2], dtype=torch.int32, device=device)
    batch.block_table[1:, :2] = garbage
    after = twin.cascade_attention(**batch.arguments(), common_prefix_len=32)
    assert same_bits(before, after)


def test_each_key_of_the_prefix_is_gathered_once(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    module = import_module("pagetwin.reference.attention.paged")
    gather, counts = module.gather_cache, []

    def counting(*arguments: Any) -> tuple[Tensor, Tensor]:
        counts.append(arguments[-1])
        found: tuple[Tensor, Tensor] = gather(*arguments)
        return found

    monkeypatch.setattr(module, "gather_cache", counting)
    batch = share_prefix(build(Plan((1, 3, 1), (40, 50, 33)), device), 32)
    TWINS["reference"].cascade_attention(**batch.arguments(), common_prefix_len=32)
    assert counts == [32, 40 - 32, 50 - 32, 33 - 32]


def test_the_twin_reads_nothing_on_the_host(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Its own lines run on tensors without contents, which cannot be read."""
    module = import_module("pagetwin.optimized.attention.cascade")
    passes = []
    monkeypatch.setattr(module, "paged_attention", lambda *a, **k: passes.append(k))
    monkeypatch.setattr(module, "merge_attn_states", lambda *a, **k: k["output"])
    batch = share_prefix(build(Plan((1, 3, 1), (40, 50, 33)), device), 32)
    with FakeTensorMode() as mode:
        fake = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in batch.arguments().items()
        }
        out = unwrap(module.cascade_attention)(**fake, common_prefix_len=32)
    assert out.shape == batch.query.shape
    assert [each["max_seq_len"] for each in passes] == [32, 50 - 32]


def batch_of_two(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return good arguments: 3 + 1 new tokens of 40 + 36 keys, 2 blocks of 16 of them shared."""
    batch = share_prefix(build(Plan((3, 1), (40, 36)), device), 32)
    return batch.arguments() | {
        "common_prefix_len": 32,
        "out": torch.zeros_like(batch.query, memory_format=torch.contiguous_format),
    }


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"common_prefix_len": -16}, ValueError, "common_prefix_len = -16: expected"),
        (
            {"common_prefix_len": 20},
            ValueError,
            "common_prefix_len = 20 is not a multiple of block_size = 16",
        ),
        (
            {"common_prefix_len": 80},
            IndexError,
            "common_prefix_len = 80: expected at most 64",
        ),
        (
            {"sliding_window": 8},
            NotImplementedError,
            "sliding_window is given: expected None, since the shared prefix is read once",
        ),
        ({"attention_chunk_size": 16}, NotImplementedError, "attention_chunk_size is"),
        ({"alibi_slopes": torch.ones(4)}, NotImplementedError, "alibi_slopes is given"),
        (
            {"position_bias": torch.ones(4, 3)},
            NotImplementedError,
            "position_bias is given",
        ),
        (
            {"query_ranges": torch.zeros(4, 2, dtype=torch.int32)},
            NotImplementedError,
            "query_ranges is given",
        ),
        (
            {"out": torch.zeros(4, 4, 16).to(torch.float8_e4m3fn)},
            TypeError,
            "out is torch.float8_e4m3fn: expected torch.float16",
        ),
        ({"sinks": torch.ones(3)}, ValueError, "sinks has shape [3]: expected [4]"),
    ],
)
def test_a_prefix_that_cannot_be_is_refused(
    changes: dict[str, Any], error: type[Exception], words: str, twin: Twin
) -> None:
    with pytest.raises(error) as caught:
        twin.raw.cascade_attention(**pack_options(**batch_of_two() | changes))
    assert words in str(caught.value)


@pytest.mark.usefixtures("checked_values")
def test_rows_that_do_not_share_the_prefix_are_refused(twin: Twin) -> None:
    arguments = batch_of_two()
    first = int(arguments["block_table"][0, 1])
    other = int(arguments["block_table"][0, 0])
    arguments["block_table"][1, 1] = other
    with pytest.raises(ValueError) as caught:
        twin.raw.cascade_attention(**pack_options(**arguments))
    assert f"block_table[1, 1] = {other}: expected {first}, as in row 0" in str(
        caught.value
    )
    assert not arguments["out"].any()


@pytest.mark.usefixtures("checked_values")
def test_a_prefix_that_reaches_into_the_new_tokens_is_refused(
    twin: Twin, device: torch.device
) -> None:
    """Its new tokens would see each other whatever their order."""
    arguments = batch_of_two(device)
    arguments["seq_lens"][0] = 34
    words = "request 0 has 31 keys before its new tokens: expected at least"
    with pytest.raises(ValueError, match=words):
        twin.raw.cascade_attention(**pack_options(**arguments))
    # a request that is not causal sees all its keys, so that they need not lie behind
    arguments["causal"] = torch.tensor([False, True], device=device)
    twin.raw.cascade_attention(**pack_options(**arguments))
    arguments["seq_lens"][0] = 31
    with pytest.raises(ValueError, match="request 0 has 31 keys: expected at least"):
        twin.raw.cascade_attention(**pack_options(**arguments))
