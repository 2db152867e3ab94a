"""Does every position lie on one rank, and does every rank know how many it has?"""

from dataclasses import replace
from importlib import import_module
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from conftest import TWINS, Twin
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pagetwin.conformance.generators.batches import (
    GARBAGE,
    NEEDLES,
    Batch,
    Plan,
    build,
    draw_rows,
    empty_cache,
    plans,
)
from pagetwin.conformance.oracles.dense import judge_attention, judge_lse
from pagetwin.contract.attention_options import pack_options
from pagetwin.contract.budgets import judge_rows
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

lengths = st.lists(st.integers(0, 70), max_size=5)
worlds = st.sampled_from([1, 2, 3, 4, 8])
runs = st.sampled_from([1, 2, 3, 16])


@given(lens=lengths, world=worlds, in_a_row=runs)
def test_the_ranks_share_out_every_position(
    lens: list[int], world: int, in_a_row: int, twin: Twin, device: torch.device
) -> None:
    """Dealt out like cards: in_a_row to each rank, then again from the first."""
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    local = twin.get_dcp_local_seq_lens(seq_lens, world, None, in_a_row)
    assert tuple(local.shape) == (len(lens), world)
    assert local.dtype == torch.int32 and local.device == seq_lens.device
    assert local.sum(1).tolist() == lens
    hands = [[0] * world for _ in lens]
    for hand, seq_len in zip(hands, lens, strict=True):
        left, rank = seq_len, 0
        while left:
            dealt = min(left, in_a_row)
            hand[rank] += dealt
            left, rank = left - dealt, (rank + 1) % world
    assert local.tolist() == hands
    for rank in range(world):
        one = twin.get_dcp_local_seq_lens(seq_lens, world, rank, in_a_row)
        assert one.tolist() == [hand[rank] for hand in hands]
    assert seq_lens.tolist() == lens


@given(length=st.integers(0, 70), world=worlds, in_a_row=runs)
def test_the_owners_of_positions_count_up_to_the_local_lengths(
    length: int, world: int, in_a_row: int, twin: Twin, device: torch.device
) -> None:
    positions = torch.arange(length, device=device)
    ranks = twin.get_dcp_ranks(positions, world, in_a_row).tolist()
    lens = torch.tensor([length], dtype=torch.int32, device=device)
    local = twin.get_dcp_local_seq_lens(lens, world, None, in_a_row)
    assert [ranks.count(rank) for rank in range(world)] == local[0].tolist()
    assert ranks[: in_a_row * world] == [
        place // in_a_row for place in range(min(length, in_a_row * world))
    ]


def test_one_rank_keeps_its_axis(twin: Twin) -> None:
    """vLLM drops it, so that the shape depends on how many ranks there are."""
    lens = torch.tensor([7, 8], dtype=torch.int32)
    assert twin.get_dcp_local_seq_lens(lens).tolist() == [[7], [8]]
    assert twin.get_dcp_local_seq_lens(lens, dcp_rank=0).tolist() == [7, 8]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dcp_world_size": 0}, "dcp_world_size = 0: expected at least 1"),
        ({"dcp_world_size": 2, "dcp_rank": 2}, "dcp_rank = 2: expected 0 <= rank"),
        ({"dcp_rank": -1}, "dcp_rank = -1"),
        ({"dcp_kv_cache_interleave_size": 0}, "interleave_size = 0"),
    ],
)
def test_ranks_that_cannot_be_are_refused(
    arguments: dict[str, int], words: str, twin: Twin
) -> None:
    arguments = dict(arguments)
    with pytest.raises(ValueError, match=words):
        twin.get_dcp_local_seq_lens(torch.tensor([7], dtype=torch.int32), **arguments)
    arguments.pop("dcp_rank", None)
    if arguments.get("dcp_world_size") != 2 and arguments:
        with pytest.raises(ValueError, match=words):
            twin.get_dcp_ranks(torch.arange(3), **{"dcp_world_size": 1, **arguments})


Share = tuple[Tensor, Tensor, Tensor]
"""One rank's key cache, value cache and block table."""


def deal(batch: Batch, twin: Twin, world: int, in_a_row: int) -> list[Share]:
    """Return what each rank keeps of a batch: NaN wherever it keeps nothing.

    The block table of each rank says which token gets which slot.
    """
    plan, device = batch.plan, batch.query.device
    tokens = [(req, place) for req, n in enumerate(plan.kv_lens) for place in range(n)]
    owned = [
        (batch.rows[req][place // plan.block_size], place % plan.block_size)
        for req, place in tokens
    ]
    blocks, offsets = torch.tensor(owned, dtype=torch.int64).view(-1, 2).T
    own = [
        cache[blocks.to(device), offsets.to(device)]
        for cache in (batch.key_cache, batch.value_cache)
    ]
    per_block = plan.block_size * world
    counts = [-(-kv_len // per_block) for kv_len in plan.kv_lens]
    shares = []
    for rank in range(world):
        width = max(counts, default=0) + plan.spare_blocks
        table = twin.BlockTable(
            plan.block_size,
            len(counts),
            width,
            device,
            dcp_world_size=world,
            dcp_rank=rank,
            dcp_kv_cache_interleave_size=in_a_row,
        )
        generator = torch.Generator().manual_seed(rank)
        rows, num_blocks = draw_rows(counts, "scattered", generator)
        for req, row in enumerate(rows):
            table.add_row(row, req)
        slots = table.compute_slot_mapping(
            [req for req, _ in tokens], [place for _, place in tokens]
        )
        caches = empty_cache(
            plan.layout,
            num_blocks,
            plan.block_size,
            plan.kv_heads,
            plan.head_size,
            plan.dtype,
            device,
        )
        twin.reshape_and_cache(*own, caches[0], caches[1], slots.to(device))
        device_rows = table.get_device_tensor(len(counts))
        for req, count in enumerate(counts):
            device_rows[req, count:] = GARBAGE[req % len(GARBAGE)]
        shares.append((caches[0], caches[1], device_rows))
    return shares


def attend_on_rank(
    batch: Batch, twin: Twin, share: Share, world: int, rank: int, in_a_row: int
) -> tuple[Tensor, Tensor]:
    """Return one rank's output in float32 and its log-sum-exp, from tensors full of NaN."""
    out, lse = batch.fresh()
    out = out.float()
    names = ("key_cache", "value_cache", "block_table")
    returned = twin.dcp_attention(
        dcp_world_size=world,
        dcp_rank=rank,
        dcp_kv_cache_interleave_size=in_a_row,
        out=out,
        lse=lse,
        **pack_options(**batch.arguments() | dict(zip(names, share, strict=True))),
    )
    assert returned is out
    return out, lse


def join(twin: Twin, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the ranks' parts as one; ranks pass log-sum-exps around token by token."""
    return twin.lse_weighted_combine(
        torch.stack([out for out, _ in parts]),
        torch.stack([lse.T for _, lse in parts]),
    )


def assert_joins(
    batch: Batch,
    twin: Twin,
    reference: Twin,
    parts: list[tuple[Tensor, Tensor]],
) -> None:
    """Assert that the ranks' parts join into attention over the whole cache."""
    joint, lse = join(twin, parts)
    verdict, exact_lse = judge_attention(
        batch, joint.to(batch.plan.dtype), reference, is_joined=True
    )
    assert verdict.ok, verdict
    share = judge_lse(batch, lse.T, exact_lse)
    assert share <= 1, f"log-sum-exp: {share:.2f} of its budget"


@settings(max_examples=min(6, settings().max_examples))
@given(
    plan=plans(max_reqs=2),
    world=st.integers(1, 4),
    in_a_row=st.sampled_from([1, 2, 16]),
)
def test_the_ranks_parts_join_into_the_whole(
    plan: Plan,
    world: int,
    in_a_row: int,
    twin: Twin,
    reference: Twin,
    device: torch.device,
) -> None:
    """Prefills, decodes and idle requests, needles at every edge, ranks without a key."""
    # each token is a program of the interpreter; one kv head keeps them few
    plan = replace(plan, kv_heads=1)
    # runs divide the kernel's block
    assume(plan.block_size % in_a_row == 0)
    batch = build(plan, device)
    parts = [
        attend_on_rank(batch, twin, share, world, rank, in_a_row)
        for rank, share in enumerate(deal(batch, twin, world, in_a_row))
    ]
    assert_joins(batch, twin, reference, parts)


@pytest.mark.parametrize("needle", NEEDLES[1:])
@pytest.mark.parametrize("in_a_row", [1, 2, 16])
def test_new_tokens_of_a_prefill_see_no_key_behind_them_on_any_rank(
    needle: str, in_a_row: int, twin: Twin, reference: Twin, device: torch.device
) -> None:
    plan = Plan((20, 1, 5), (37, 65, 5), kv_heads=1, needle=needle, padding=2)
    batch = build(plan, device)
    parts = [
        attend_on_rank(batch, twin, share, 3, rank, in_a_row)
        for rank, share in enumerate(deal(batch, twin, 3, in_a_row))
    ]
    assert_joins(batch, twin, reference, parts)


def test_a_rank_without_keys_gives_zero_and_minus_infinity(
    twin: Twin, device: torch.device
) -> None:
    batch = build(Plan((1, 3), (1, 20), padding=1), device)
    shares = deal(batch, twin, 4, 16)
    parts = [
        attend_on_rank(batch, twin, share, 4, rank, 16)
        for rank, share in enumerate(shares)
    ]
    for rank, (out, lse) in enumerate(parts):
        # tokens at 0, 17, 18, 19, and a row behind the last request: rank 1 has from 16
        has_keys = [rank == 0] + [rank < 2] * 3 + [False]
        assert (lse[0] > -torch.inf).tolist() == has_keys
        assert out.any(2).any(1).tolist() == has_keys
        assert bool(torch.isfinite(out).all())


def test_sinks_count_once_whatever_the_number_of_ranks(
    twin: Twin, reference: Twin, device: torch.device
) -> None:
    """Every rank is given them; taken in by all, three ranks' sinks would weigh threefold."""
    batch = build(Plan((3, 1), (40, 9), padding=2), device)
    options = {
        "sinks": torch.tensor([-9.0, 0.0, 2.0, 5.0], device=device),
        "logits_soft_cap": 3.0,
    }
    outs, lses = [], []
    for rank, share in enumerate(deal(batch, twin, 3, 2)):
        out, lse = batch.fresh()
        names = ("key_cache", "value_cache", "block_table")
        arguments = batch.arguments() | dict(zip(names, share, strict=True))
        twin.dcp_attention(dcp_world_size=3, dcp_rank=rank, dcp_kv_cache_interleave_size=2, out=out, lse=lse, **pack_options(**arguments, **options))  # fmt: skip
        outs.append(out)
        lses.append(lse.T)
    joint, lse = twin.lse_weighted_combine(torch.stack(outs), torch.stack(lses))
    exact, exact_lse = batch.fresh(torch.float64)
    arguments = batch.arguments() | options
    reference.paged_attention(
        out=exact,
        lse=exact_lse,
        compute_dtype=torch.float64,
        **pack_options(**arguments),
    )
    same = reference.paged_attention(**pack_options(**arguments))
    sizes = reference.paged_attention(
        **pack_options(**arguments | {"value_cache": batch.value_cache.abs()})
    )
    verdict = judge_rows(joint, exact, same, torch.float32, sizes)
    assert verdict.ok, verdict
    assert judge_lse(batch, lse.T, exact_lse) <= 1


def test_a_quantised_share_is_read_with_its_scales(
    twin: Twin, device: torch.device
) -> None:
    """As the same numbers in float32 are."""
    batch = build(Plan((2, 1), (33, 9)), device)
    key, value, table = deal(batch, twin, 2, 1)[1]
    quantised = [cache.contiguous().to(torch.float8_e4m3fn) for cache in (key, value)]
    widened = [quantised[0].float() * 0.5, quantised[1].float() * 2.0]
    names = ("key_cache", "value_cache", "block_table")
    ranks = {"dcp_world_size": 2, "dcp_rank": 1}
    found, exact, same = (
        which.dcp_attention(
            **pack_options(
                **batch.arguments() | dict(zip(names, (*caches, table), strict=True)),
                **ranks,
                **more,
            )
        )
        for which, caches, more in (
            (twin, quantised, {"k_scale": 0.5, "v_scale": 2.0}),
            (
                TWINS["reference"],
                widened,
                {
                    "compute_dtype": torch.float64,
                    "out": torch.empty_like(batch.query, dtype=torch.float64),
                },
            ),
            (TWINS["reference"], widened, {}),
        )
    )
    verdict = judge_rows(found, exact, same, torch.float32)
    assert verdict.ok, verdict


def test_the_twin_attends_without_reading_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own lines run on tensors without contents, which cannot be read."""
    module = import_module("pagetwin.optimized.attention.context_parallel")
    monkeypatch.setattr(module, "paged_attention", lambda *a, **k: (a, k))
    batch = build(Plan((3, 1), (40, 9), padding=2))
    with FakeTensorMode() as mode:
        fake = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in batch.arguments().items()
        }
        attention = unwrap(module.dcp_attention)
        given_on, named = attention(**fake, dcp_world_size=2, dcp_rank=1)
    query, _, _, table, starts, lens = given_on
    assert [len(each) for each in (query, table, starts, lens)] == [6, 6, 7, 6]
    assert named["max_seq_len"] == 20 and named["max_query_len"] == 1


def on_one_rank(rank: int, folder: str) -> None:
    """Attend to one rank's share in a process of its own, and join what all ranks send."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", world_size=2, rank=rank
    )
    for twin in TWINS.values():
        batch = build(Plan((4, 1, 1), (21, 40, 1), kv_heads=1, needle="last"), device)
        share = deal(batch, TWINS["reference"], 2, 2)[rank]
        parts: list[list[Tensor]] = []
        for tensor in attend_on_rank(batch, twin, share, 2, rank, 2):
            everyones = [torch.empty(tensor.shape) for _ in range(2)]
            torch.distributed.all_gather(everyones, tensor.cpu())
            parts.append([each.to(device) for each in everyones])
        pairs = list(zip(*parts, strict=True))
        assert_joins(batch, twin, TWINS["reference"], pairs)
    torch.distributed.destroy_process_group()


def test_two_processes_join_what_they_send_each_other(tmp_path: Path) -> None:
    """Over gloo; what fails in one of them fails here, with its traceback."""
    torch.multiprocessing.spawn(on_one_rank, (str(tmp_path),), nprocs=2)


def share_of_two() -> dict[str, Any]:
    """Return good arguments: 3 + 1 new tokens of 40 + 9 keys on two ranks, of which rank 1's."""
    batch = build(Plan((3, 1), (40, 9), spare_blocks=0))
    key, value, table = deal(batch, TWINS["reference"], 2, 1)[1]
    return batch.arguments() | {
        "key_cache": key,
        "value_cache": value,
        "block_table": table,
        "dcp_world_size": 2,
        "dcp_rank": 1,
        "out": torch.zeros_like(batch.query, memory_format=torch.contiguous_format),
    }


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"dcp_rank": 2}, ValueError, "dcp_rank = 2: expected 0 <= rank"),
        ({"dcp_world_size": 0}, ValueError, "dcp_world_size = 0: expected at least 1"),
        (
            {"dcp_kv_cache_interleave_size": 0},
            ValueError,
            "dcp_kv_cache_interleave_size = 0",
        ),
        (
            {"max_seq_len": 67},
            IndexError,
            "max_seq_len = 67 gives rank 1 33 keys: expected at most 32",
        ),
        ({"max_seq_len": -1}, ValueError, "max_seq_len = -1: expected at least 0"),
        (
            {"sliding_window": 8},
            NotImplementedError,
            "sliding_window is given: expected None, since a rank packs its share",
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
            {"seq_lens": torch.tensor([40, 9])},
            TypeError,
            "seq_lens is torch.int64: expected torch.int32",
        ),
    ],
)
def test_shares_that_cannot_be_are_refused(
    changes: dict[str, Any], error: type[Exception], words: str, twin: Twin
) -> None:
    with pytest.raises(error) as caught:
        twin.raw.dcp_attention(**pack_options(**share_of_two() | changes))
    assert words in str(caught.value)


@pytest.mark.usefixtures("checked_values")
@pytest.mark.parametrize(
    ("lens", "error", "words"),
    [
        ([2, 9], ValueError, "request 0 has 3 queries on 2 keys and is causal"),
        ([41, 9], ValueError, "seq_lens[0] = 41: expected at most max_seq_len = 40"),
        ([-1, 9], ValueError, "request 0 has 3 queries on -1 keys and is causal"),
    ],
)
def test_lengths_that_cannot_be_are_refused(
    lens: list[int], error: type[Exception], words: str, twin: Twin
) -> None:
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    with pytest.raises(error) as caught:
        twin.raw.dcp_attention(
            **pack_options(**share_of_two() | {"seq_lens": seq_lens})
        )
    assert words in str(caught.value)


@pytest.mark.usefixtures("checked_values")
def test_a_block_that_the_rank_lacks_is_refused_by_request(twin: Twin) -> None:
    arguments = share_of_two()
    arguments["block_table"][0, 1] = 99
    words = r"block_table\[0, 1\] = 99 is outside the cache"
    with pytest.raises(IndexError, match=words):
        twin.raw.dcp_attention(**pack_options(**arguments))
    assert not arguments["out"].any()
