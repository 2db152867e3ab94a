"""Does every option of attention mean the same in every batch, on both twins?

Needles lie at each edge that an option makes; laws hold with options on; what nobody sees may hold
anything; what means nothing is refused. Every pair of options: test_option_pairs.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from conftest import Twin
from pagetwin.conformance.generators.batches import DTYPES, NAN, Plan
from pagetwin.conformance.generators.options import (
    Call,
    bias_table,
    paged_call,
    quantised_call,
    ragged_call,
    slopes,
    tree_of,
)
from pagetwin.conformance.oracles.brute_force import judge_log_sum_exp, places, sees
from pagetwin.conformance.oracles.dense import same_bits
from torch import Tensor

OPERATIONS = ("paged_attention", "encoder_attention")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Edge:
    """One query of a request, one key, and whether it sees it.

    Args:
        name: where the key lies.
        query_len, key_len: of the request.
        own: the query.
        needle: the key, which outweighs all others.
        seen: whether the query sees it.
        options: what hides it or does not.
        moved: options under which it is the other way round.
    """

    name: str
    query_len: int
    key_len: int
    own: int
    needle: int
    seen: bool
    options: dict[str, Any] = field(default_factory=dict)
    moved: dict[str, Any] | None = None

    @property
    def is_paged_only(self) -> bool:
        return "tree_mask" in self.options


def ranges(tokens: int, first: int, last: int) -> Tensor:
    return torch.tensor([[first, last]] * tokens, dtype=torch.int32)


# tokens 1 and 2 follow token 0, 3 follows 1, and 4 follows 2
TREE = tree_of([None, 0, 0, 1, 2], 6)[None]
SIBLING = tree_of([None, 0, 0, 1, 1], 6)[None]


def edges() -> Iterator[Edge]:
    # (queries, keys, query): a decode, the first and a later query of a chunk of a prompt
    spots = [(1, 70, 0), (20, 70, 3), (20, 70, 19)]
    for query_len, key_len, own in spots:
        place = key_len - query_len + own
        shape = (query_len, key_len, own)
        for window in (1, 16, 33):
            given = {"sliding_window": window}
            wider = {"sliding_window": window + 1}
            narrower = {"sliding_window": window - 1} if window > 1 else None
            first = place - window + 1
            yield Edge(
                f"first of window {window}", *shape, first, True, given, narrower
            )
            yield Edge(
                f"before window {window}", *shape, first - 1, False, given, wider
            )
        for size in (16, 33):
            given = {"attention_chunk_size": size}
            start = place // size * size
            # a chunk as long as the positions before it starts there
            moved = {"attention_chunk_size": start - 1}
            yield Edge(f"first of chunk {size}", *shape, start, True, given)
            yield Edge(f"before chunk {size}", *shape, start - 1, False, given, moved)
        yield Edge("own key", *shape, place, True)
    shape, place = (32, 82, 3), 53
    both = {"causal": False}
    yield Edge("key after its own", *shape, place + 1, False, {}, both)
    yield Edge(
        "key after its own, not causal", *shape, place + 1, True, both, {"causal": True}
    )
    flags = {"causal": torch.tensor([False])}
    moved = {"causal": torch.tensor([True])}
    yield Edge("key after its own, flag", *shape, place + 1, True, flags, moved)
    yield Edge("key after its own, other flag", *shape, place + 1, False, moved, flags)
    for window in (1, 16):
        given = both | {"sliding_window": window}
        wider = both | {"sliding_window": window + 1}
        right = place + window
        yield Edge(f"right end of window {window}", *shape, right - 1, True, given)
        yield Edge(f"past window {window}", *shape, right, False, given, wider)
    given = both | {"attention_chunk_size": 16}
    yield Edge("last of its chunk", *shape, 63, True, given)
    yield Edge("first of the next chunk", *shape, 64, False, given)
    for first, last in ((20, 40), (60, 80)):  # behind a window, and ahead of the query
        for needle, seen, moved in (
            (first, True, (first + 1, last)),
            (first - 1, False, (first - 1, last)),
            (last, True, (first, last - 1)),
            (last + 1, False, (first, last + 1)),
        ):
            hidden = {"sliding_window": 4}
            given = hidden | {"query_ranges": ranges(32, first, last)}
            other = hidden | {"query_ranges": ranges(32, *moved)}
            name = f"key {needle} of range {first} to {last}"
            yield Edge(name, *shape, needle, seen, given, other)
    shape, given, other = (5, 30, 4), {"tree_mask": TREE}, {"tree_mask": SIBLING}
    yield Edge("last before a tree", *shape, 24, True, given)
    yield Edge("root of a tree", *shape, 25, True, given)
    yield Edge("sibling of a parent", *shape, 26, False, given, other)
    yield Edge("parent in a tree", *shape, 27, True, given, other)
    yield Edge("sibling in a tree", *shape, 28, False, given)
    yield Edge("own key in a tree", *shape, 29, True, given)
    full = {"tree_mask": TREE[:, :5, :5]}  # as wide as the request has new tokens
    yield Edge("sibling in a full tree", *shape, 28, False, full, {"tree_mask": None})
    narrow, wide = ({"tree_mask": TREE, "sliding_window": size} for size in (2, 3))
    yield Edge("root behind a window", *shape, 25, False, narrow, wide)
    yield Edge("parent in a window", *shape, 27, True, narrow)
    for key_len in (3, 33):
        yield Edge(f"first of {key_len} keys across", 5, key_len, 2, 0, True, both)
        last = key_len - 1
        yield Edge(f"last of {key_len} keys across", 5, key_len, 0, last, True, both)
    # tiles of 32, 64 and 128 keys, and the parts a long row is cut into
    for edge in (32, 64, 128):
        yield Edge(f"last before tile edge {edge}", 1, 140, 0, edge - 1, True)
        yield Edge(
            f"first after tile edge {edge}", 20, 140, 3, edge - (edge == 128) * 5, True
        )
        window = {"sliding_window": 140 - edge}
        yield Edge(f"window from tile edge {edge}", 1, 140, 0, edge, True, window)
        yield Edge(f"window past tile edge {edge}", 1, 140, 0, edge - 1, False, window)
    for edge in (256, 512):
        yield Edge(f"last before split {edge}", 1, 600, 0, edge - 1, True)
        yield Edge(f"first after split {edge}", 1, 600, 0, edge, True)


EDGES = list(edges())


def edge_call(number: int, operation: str, device: torch.device) -> Call:
    edge = EDGES[number]
    plan = Plan(
        (edge.query_len,),
        (edge.key_len,),
        kv_heads=1,
        dtype=DTYPES[number % 3],
        seed=number,
    )
    call = paged_call(plan, device, [(0, edge.needle)], **edge.options)
    return call if operation == "paged_attention" else ragged_call(call)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("number", range(len(EDGES)), ids=[edge.name for edge in EDGES])
def test_a_needle_at_the_edge_is_seen_or_not(
    number: int, operation: str, twin: Twin, reference: Twin, device: torch.device
) -> None:
    edge = EDGES[number]
    if edge.is_paged_only and operation != "paged_attention":
        return
    call = edge_call(number, operation, device)
    given = call.arguments
    both = places(0, edge.query_len, edge.key_len, given)
    assert sees(0, edge.own, edge.own, edge.needle, *both, given) is edge.seen
    answer = call.assert_right(*call.run(twin), reference)
    # one key more or less for one query is an error that the judge sees
    wrong = call.answer(
        flip=lambda req, own, key: (own, key) == (edge.own, edge.needle)
    )
    verdict = call.judge(wrong.out.to(call.dtype), answer, reference)
    assert not verdict.ok and verdict.row == edge.own
    assert judge_log_sum_exp(wrong.lse, answer) > 1
    if edge.moved is not None:
        gone = dict.fromkeys(edge.options)
        causal = {"causal": edge.moved.get("causal", True)}
        out, lse = call.changed(**gone | edge.moved | causal).run(twin)
        assert not call.judge(out, answer, reference).ok
        assert lse is not None and judge_log_sum_exp(lse, answer) > 1


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("query_len", [1, 7])
def test_a_needle_in_fp8_has_the_scale_of_its_head(
    dtype: torch.dtype,
    query_len: int,
    twin: Twin,
    reference: Twin,
    device: torch.device,
) -> None:
    scales = torch.tensor([0.5, 1.0]), torch.tensor([0.02, 0.05])
    plan = Plan((query_len,), (40,), dtype=torch.float16)
    call = quantised_call(paged_call(plan, device, [(0, 33)]), dtype, *scales)
    answer = call.assert_right(*call.run(twin), reference)
    for name, scale in (("k_scale", scales[0]), ("v_scale", scales[1])):
        for wrong in (scale.flip(0), scale[0], 1.0):
            faulty = call.answer(**{name: wrong})
            if name == "k_scale":  # the needle's score alone decides its log-sum-exp
                assert judge_log_sum_exp(faulty.lse, answer) > 1, wrong
            else:
                out = faulty.out.to(call.dtype)
                assert not call.judge(out, answer, reference).ok, wrong


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("query_len", [1, 7])
def test_a_sink_shares_the_weight_of_a_needle(
    query_len: int, operation: str, twin: Twin, reference: Twin, device: torch.device
) -> None:
    """A sink as heavy as the needle halves the output; without it the judge says no."""
    plan = Plan((query_len,), (40,), kv_heads=1)
    call = paged_call(plan, device, [(0, 33)])
    call = call if operation == "paged_attention" else ragged_call(call)
    level = call.answer().lse[:, -1].float().to(device)
    call = call.changed(sinks=level)
    out, lse = call.run(twin)
    answer = call.assert_right(out, lse, reference)
    alone = call.answer(sinks=None)
    assert torch.allclose(out[-1].cpu().double(), alone.out[-1] / 2, atol=1e-5)
    assert not call.judge(alone.out.float(), answer, reference).ok
    out, lse = call.changed(sinks=torch.full_like(level, 1e4)).run(twin)
    assert torch.equal(out, torch.zeros_like(out))
    assert lse is not None and torch.allclose(lse, torch.full_like(lse, 1e4))


def test_a_sink_takes_all_where_nothing_is_seen(
    twin: Twin, reference: Twin, device: torch.device
) -> None:
    call = paged_call(Plan((3, 1), (0, 9), kv_heads=1, padding=2), device, causal=False)
    out, lse = call.run(twin)
    assert lse is not None
    assert bool((out[:3] == 0).all()) and bool((lse[:, :3] == -torch.inf).all())
    sinks = torch.tensor([-2.0, 3.0], device=device)
    out, lse = call.changed(sinks=sinks).run(twin)
    assert lse is not None
    assert bool((out[:3] == 0).all()) and torch.equal(
        lse[:, :3], sinks[:, None].expand(2, 3)
    )
    assert bool((out[4:] == 0).all()) and bool((lse[:, 4:] == -torch.inf).all())
    call.changed(sinks=sinks).assert_right(out, lse, reference)


CHANGES: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.9},
    "sliding_window": {"sliding_window": 5},
    "logits_soft_cap": {"logits_soft_cap": 0.3},
    "alibi_slopes": {"alibi_slopes": slopes(4)},
    "sinks": {"sinks": slopes(4)},
    "causal": {"causal": False},
    "causal of each request": {"causal": torch.tensor([True, False])},
    "attention_chunk_size": {"attention_chunk_size": 8},
    "tree_mask": {"tree_mask": TREE.repeat(2, 1, 1)},
    "query_ranges": {"query_ranges": ranges(6, 18, 19)},
    "position_bias": {"position_bias": bias_table(4)},
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_something(
    name: str, operation: str, twin: Twin, reference: Twin, device: torch.device
) -> None:
    """And not just something: what comes out is right."""
    if name == "tree_mask" and operation != "paged_attention":
        return
    plain = paged_call(Plan((1, 5), (45, 20)), device)
    plain = plain if operation == "paged_attention" else ragged_call(plain)
    before, lse_before = plain.run_both(twin)
    call = plain.changed(**CHANGES[name])
    out, lse = call.run_both(twin)
    assert not torch.allclose(out, before, atol=1e-3)
    assert not torch.allclose(lse, lse_before, atol=1e-3)
    call.assert_right(out, lse, reference)


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "out_scale"])
def test_every_scale_changes_something(
    name: str, twin: Twin, reference: Twin, device: torch.device
) -> None:
    call = quantised_call(
        paged_call(Plan((1, 5), (45, 20)), device), FP8[0], 0.03, 0.02
    )
    call = replace(call, out_dtype=FP8[0]).changed(out_scale=0.01)
    before, lse_before = call.run_both(twin)
    call = call.changed(**{name: 0.05})
    out, lse = call.run_both(twin)
    assert not torch.allclose(out.float(), before.float(), atol=1e-3)
    assert torch.allclose(lse, lse_before) is (name != "k_scale")
    call.assert_right(out, lse, reference)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_an_fp8_output_stops_at_its_largest_number(
    dtype: torch.dtype, twin: Twin, reference: Twin, device: torch.device
) -> None:
    call = paged_call(Plan((1, 5), (45, 20), padding=1), device, out_scale=1e-6)
    call = replace(call, out_dtype=dtype)
    out, lse = call.run_both(twin)
    call.assert_right(out, lse, reference)
    largest = torch.finfo(dtype).max
    assert bool((out[:6].float().abs() == largest).float().mean() > 0.8)
    assert bool((out[6:].float() == 0).all())


def with_options(name: str, call: Call) -> Call:
    """Return a call under one set of options; the three requests' images lie at 8 to 15."""
    heads = call.query.shape[1]
    images = torch.full((len(call.query), 2), -1, dtype=torch.int32)
    token = 0
    for query_len, key_len in zip(call.query_lens, call.key_lens, strict=True):
        for place in range(key_len - query_len, key_len):
            if 8 <= place < 16:
                images[token] = torch.tensor([8, 15])
            token += 1
    if name == "FP8, window and cap":
        call = quantised_call(call, FP8[0], torch.tensor([0.05, 0.1]), 0.03)
        return call.changed(sliding_window=9, logits_soft_cap=3.0)
    sets: dict[str, dict[str, Any]] = {
        "chunks and ALiBi": {
            "attention_chunk_size": 12,
            "alibi_slopes": slopes(heads),
        },
        "ranges, bias and sinks": {
            "sliding_window": 5,
            "query_ranges": images,
            "position_bias": bias_table(heads),
            "sinks": slopes(heads),
        },
    }
    return call.changed(**sets[name])


SETS = ("FP8, window and cap", "chunks and ALiBi", "ranges, bias and sinks")
THREE = Plan((1, 20, 7), (45, 33, 40), padding=1)


def rows_of(call: Call, reqs: list[int]) -> list[int]:
    starts = [0, *itertools.accumulate(call.query_lens)]
    return [token for req in reqs for token in range(starts[req], starts[req + 1])]


def only(call: Call, reqs: list[int]) -> Call:
    """Return a paged call of some of its requests, in that order, without padding."""
    rows = rows_of(call, reqs)
    given = call.arguments
    each_token = {
        name: given[name][rows] for name in ("query", "query_ranges") if name in given
    }
    each_request = {
        name: given[name][reqs]
        for name in ("block_table", "seq_lens", "tree_mask", "causal")
        if isinstance(given.get(name), Tensor)
    }
    query_lens = tuple(call.query_lens[req] for req in reqs)
    starts = [0, *itertools.accumulate(query_lens)]
    start_loc = torch.tensor(starts, dtype=torch.int32, device=call.query.device)
    return replace(
        call.changed(**each_token, **each_request, query_start_loc=start_loc),
        query_lens=query_lens,
        key_lens=tuple(call.key_lens[req] for req in reqs),
        rows=[call.rows[req] for req in reqs],
    )


@pytest.mark.parametrize("name", SETS)
def test_where_a_block_lies_does_not_matter_under_options(
    name: str, twin: Twin, reference: Twin, device: torch.device
) -> None:
    call = with_options(name, paged_call(THREE, device))
    before = call.run_both(twin)
    call.assert_right(*before, reference)
    num_blocks = call.arguments["key_cache"].shape[0]
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3))
    moved_to = order.to(device)
    caches = {}
    for cache in ("key_cache", "value_cache"):
        moved = torch.empty_like(call.arguments[cache])
        moved[moved_to] = call.arguments[cache]
        caches[cache] = moved
    table = call.arguments["block_table"].clone()
    for req, row in enumerate(call.rows):
        table[req, : len(row)] = moved_to[row].int()
    after = call.changed(**caches, block_table=table).run_both(twin)
    for one, other in zip(before, after, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("name", SETS)
def test_neither_order_nor_neighbours_matter_under_options(
    name: str, twin: Twin, reference: Twin, device: torch.device
) -> None:
    call = with_options(name, paged_call(THREE, device))
    for reqs in ([2, 0, 1], [1], [0]):
        part = only(call, reqs)
        out, lse = part.run_both(twin)
        part.assert_right(out, lse, reference)
        together, lse_together = call.run_both(twin)
        rows = rows_of(call, reqs)
        part.assert_right(together[rows], lse_together[:, rows], reference)


@pytest.mark.parametrize("cuts", [(16,), (8, 16, 24), tuple(range(1, 33))], ids=str)
@pytest.mark.parametrize("name", SETS)
def test_a_prompt_in_chunks_is_the_prompt_in_one_under_options(
    name: str,
    cuts: tuple[int, ...],
    twin: Twin,
    reference: Twin,
    device: torch.device,
) -> None:
    """The image lies in one chunk: a query sees none of it that is not there yet."""
    if name.startswith("ranges") and len(cuts) > 3:
        return
    whole = with_options(name, paged_call(Plan((33,), (33,)), device))
    outs, lses = [], []
    for begin, end in itertools.pairwise([0, *cuts, 33]):
        given = whole.arguments
        int32 = {"dtype": torch.int32, "device": device}
        part = whole.changed(
            query=given["query"][begin:end],
            query_ranges=given["query_ranges"][begin:end]
            if "query_ranges" in given
            else None,
            query_start_loc=torch.tensor([0, end - begin], **int32),
            seq_lens=torch.tensor([end], **int32),
            max_query_len=end - begin,
            max_seq_len=end,
        )
        out, lse = part.run_both(twin)
        outs.append(out)
        lses.append(lse)
    whole.assert_right(torch.cat(outs), torch.cat(lses, 1), reference)


@pytest.mark.parametrize("name", SETS)
def test_more_splits_do_not_matter_beyond_rounding(
    name: str, twin: Twin, reference: Twin, device: torch.device
) -> None:
    """A larger bound on the keys cuts a long row into more parts."""
    plan = Plan((1, 1), (40, 70), spare_blocks=300)
    call = with_options(name, paged_call(plan, device))
    for bound in (70, 130, 300, 4000):
        part = call.changed(max_seq_len=bound)
        part.assert_right(*part.run_both(twin), reference)


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 9, "alibi_slopes": slopes(4)}, {"attention_chunk_size": 8}],
    ids=["plain", "window and ALiBi", "chunks"],
)
def test_a_tree_that_is_a_chain_is_causal(
    options: dict[str, Any], twin: Twin, reference: Twin, device: torch.device
) -> None:
    causal = paged_call(Plan((5, 1, 12), (30, 18, 12)), device, **options)
    # the third request has more new tokens than the tree is wide: its mask is not read
    chain = torch.ones(3, 6, 6, dtype=torch.bool).tril()
    chain[2] = False
    tree = causal.changed(tree_mask=chain)
    out, lse = tree.run_both(twin)
    causal.assert_right(out, lse, reference)
    tree.assert_right(out, lse, reference)


def test_a_range_over_everything_is_not_causal(
    twin: Twin, reference: Twin, device: torch.device
) -> None:
    causal = paged_call(Plan((5, 1, 20), (30, 18, 20)), device, sliding_window=3)
    wide = causal.changed(query_ranges=ranges(26, 0, 29))
    out, lse = wide.run_both(twin)
    open_call = causal.changed(causal=False, sliding_window=None)
    open_call.assert_right(out, lse, reference)


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 9}], ids=["plain", "window"]
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_flags_of_each_request_are_two_calls(
    operation: str,
    options: dict[str, Any],
    twin: Twin,
    reference: Twin,
    device: torch.device,
) -> None:
    flags = torch.tensor([True, False, True], device=device)
    call = paged_call(THREE, device, causal=flags, **options)
    make = ragged_call if operation == "encoder_attention" else lambda each: each
    out, lse = make(call).run_both(twin)
    for flag, reqs in ((True, [0, 2]), (False, [1])):
        part = make(only(call, reqs)).changed(causal=flag)
        rows = rows_of(call, reqs)
        part.assert_right(out[rows], lse[:, rows], reference)
        part.assert_right(*part.run_both(twin), reference)


@pytest.mark.parametrize("lens", [(200, 170), (133, 141), (90, 75), (1000, 511)])
@pytest.mark.parametrize("fp8", [False, True])
def test_keys_before_every_window_are_never_read(
    lens: tuple[int, int], fp8: bool, twin: Twin, device: torch.device
) -> None:
    """A window's blocks are given away behind it, and then hold anything.

    A tile that began before the window once brought their NaN in, with weight 0.
    """
    plan = Plan((1, 3), lens, kv_heads=1)
    call = paged_call(plan, device, sliding_window=8)
    call = quantised_call(call, FP8[0], 0.1, 0.1) if fp8 else call
    gone = [
        (key_len - query_len - 7) // 16
        for query_len, key_len in zip((1, 3), lens, strict=True)
    ]
    assert min(gone) > 2
    same_after_poison(twin, call, lambda: give_away(call, gone))


@pytest.mark.parametrize("lens", [(100, 70), (65, 190)])
def test_keys_before_every_chunk_are_never_read(
    lens: tuple[int, int], twin: Twin, device: torch.device
) -> None:
    plan = Plan((1, 3), lens, kv_heads=1)
    call = paged_call(plan, device, attention_chunk_size=32)
    firsts = [
        (key_len - query_len) // 32 * 32
        for query_len, key_len in zip((1, 3), lens, strict=True)
    ]
    assert min(firsts) >= 32
    same_after_poison(
        twin, call, lambda: give_away(call, [first // 16 for first in firsts])
    )


def give_away(call: Call, gone: list[int]) -> None:
    """Fill the first blocks of each request with NaN."""
    for row, count in zip(call.rows, gone, strict=True):
        for name in ("key_cache", "value_cache"):
            cache = call.arguments[name]
            cache[row[:count]] = torch.full((), NAN).to(cache)


def same_after_poison(twin: Twin, call: Call, poison: Callable[[], None]) -> None:
    """Assert that not a bit of the result changes, and that it is a number."""
    before = call.run_both(twin)
    poison()
    after = call.run_both(twin)
    assert bool(torch.isfinite(after[0][: sum(call.query_lens)].float()).all())
    for one, other in zip(before, after, strict=True):
        assert same_bits(one, other)


def test_what_a_tree_or_a_range_does_not_reach_is_never_read(
    twin: Twin, device: torch.device
) -> None:
    """Mask entries past a request's own tokens, ranges of padding rows, flags without tokens."""
    tree = torch.zeros(3, 8, 8, dtype=torch.bool)
    tree[:, :5, :5] = TREE[0, :5, :5]
    plan = Plan((5, 3, 0), (30, 20, 9), padding=2)
    call = paged_call(plan, device, tree_mask=tree, query_ranges=ranges(10, -1, -1))

    def poison() -> None:
        mask, own = call.arguments["tree_mask"], (5, 3, 0)
        for req, count in enumerate(own):
            mask[req, count:] = True
            mask[req, :, count:] = True
        call.arguments["query_ranges"][8:] = torch.tensor([0, 2**31 - 1])
        call.query[8:] = 1e4

    same_after_poison(twin, call, poison)
    flags = torch.tensor([True, False, True], device=device)
    idle = call.changed(tree_mask=None, causal=flags)
    same_after_poison(twin, idle, lambda: flags.__setitem__(2, False))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_biases_of_distances_that_do_not_occur_are_never_read(
    operation: str, twin: Twin, reference: Twin, device: torch.device
) -> None:
    """Twelve keys reach from -11 to 0, of a table from -20 to 20."""
    table = bias_table(4, 20)
    table[:, :9] = NAN
    table[:, 21:] = NAN
    call = paged_call(Plan((3, 12), (10, 12)), device, position_bias=table)
    call = call if operation == "paged_attention" else ragged_call(call)
    out, lse = call.run_both(twin)
    assert not bool(out.isnan().any())
    call.assert_right(out, lse, reference)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_slots_that_nobody_owns_may_hold_any_code(
    dtype: torch.dtype, twin: Twin, device: torch.device
) -> None:
    """An unwritten FP8 slot is NaN, infinity or a number, as it comes."""
    plan = replace(THREE, dtype=torch.bfloat16)
    call = quantised_call(paged_call(plan, device), dtype, 0.1, 0.1)
    owned = torch.zeros(call.arguments["key_cache"].shape[:2], dtype=torch.bool)
    for row, key_len in zip(call.rows, call.key_lens, strict=True):
        for place in range(key_len):
            owned[row[place // 16], place % 16] = True
    owned = owned.to(device)
    assert bool(call.arguments["key_cache"][~owned].float().isnan().all())

    def poison() -> None:
        for name in ("key_cache", "value_cache"):
            codes = call.arguments[name].view(torch.uint8)
            codes[~owned] = 0x7E  # the largest number of e4m3, NaN in e5m2

    same_after_poison(twin, call, poison)


def test_values_may_be_smaller_than_keys(
    twin: Twin, reference: Twin, device: torch.device
) -> None:
    """Keys of 576 and values of 512 elements, as latent attention has them."""
    plan = Plan(
        (2, 1), (20, 33), kv_heads=1, group=4, head_size=576, dtype=torch.bfloat16
    )
    call = paged_call(plan, device, sliding_window=18, sinks=slopes(4))
    call = call.changed(value_cache=call.arguments["value_cache"][..., :512])
    out, lse = call.run_both(twin)
    assert out.shape[-1] == 512
    call.assert_right(out, lse, reference)


@pytest.mark.parametrize("layout", ["separate", "interleaved hnd"])
def test_blocks_of_544_under_options(
    layout: str, twin: Twin, reference: Twin, device: torch.device
) -> None:
    plan = Plan((1, 2), (545, 600), block_size=544, kv_heads=1, layout=layout)
    call = paged_call(plan, device, [(0, 513), (1, 570)], sliding_window=32)
    call.assert_right(*call.run_both(twin), reference)


Change = Callable[[Call], dict[str, Any]]

REFUSALS: dict[str, tuple[Change, type[Exception], str]] = {
    "window 0": (
        lambda call: {"sliding_window": 0},
        ValueError,
        "sliding_window = 0: expected at least 1",
    ),
    "window -3": (
        lambda call: {"sliding_window": -3},
        ValueError,
        "sliding_window = -3: expected at least 1",
    ),
    "chunk 0": (
        lambda call: {"attention_chunk_size": 0},
        ValueError,
        "attention_chunk_size = 0: expected at least 1",
    ),
    **{
        f"cap {cap}": (
            lambda call, cap=cap: {"logits_soft_cap": cap},
            ValueError,
            f"logits_soft_cap = {cap}: expected a number above 0, or None for no cap",
        )
        for cap in (0.0, -1.0, float("inf"), NAN)
    },
    **{
        f"{name} for other heads": (
            lambda call, name=name: {name: torch.zeros(3)},
            ValueError,
            f"{name} has shape [3]: expected [4] (query heads)",
        )
        for name in ("alibi_slopes", "sinks")
    },
    **{
        f"{name} in float64": (
            lambda call, name=name: {name: torch.zeros(4, dtype=torch.float64)},
            TypeError,
            f"{name} is torch.float64: expected torch.float32",
        )
        for name in ("alibi_slopes", "sinks")
    },
    "flags for other requests": (
        lambda call: {"causal": torch.tensor([True])},
        ValueError,
        "causal has shape [1]: expected [2] (requests)",
    ),
    "flags that are numbers": (
        lambda call: {"causal": torch.ones(2, dtype=torch.int32)},
        TypeError,
        "causal is torch.int32: expected torch.bool",
    ),
    "ranges for other tokens": (
        lambda call: {"query_ranges": ranges(3, 0, 1)},
        ValueError,
        "query_ranges has shape [3, 2]: expected [4, 2], first and last position for each"
        " token",
    ),
    "ranges of 64 bits": (
        lambda call: {"query_ranges": ranges(4, 0, 1).long()},
        TypeError,
        "query_ranges is torch.int64: expected torch.int32",
    ),
    "a bias without a middle": (
        lambda call: {"position_bias": torch.zeros(4, 8)},
        ValueError,
        "position_bias has shape [4, 8]: expected [4, 2 * reach + 1], an entry for each"
        " distance from -reach to reach",
    ),
    "a bias for other heads": (
        lambda call: {"position_bias": torch.zeros(2, 9)},
        ValueError,
        "position_bias has shape [2, 9]: expected [4, 2 * reach + 1], an entry for each"
        " distance from -reach to reach",
    ),
    "a bias in float16": (
        lambda call: {"position_bias": torch.zeros(4, 9, dtype=torch.float16)},
        TypeError,
        "position_bias is torch.float16: expected torch.float32",
    ),
    "an output scale without an output": (
        lambda call: {"out_scale": 1.0, "out": None},
        ValueError,
        "out_scale is given but out is None: expected a tensor of torch.float8_e4m3fn or"
        " torch.float8_e5m2",
    ),
    "an output scale beside float32": (
        lambda call: {"out_scale": 1.0, "out": torch.zeros(4, 4, 16)},
        ValueError,
        "out_scale is given but out is torch.float32: expected a tensor of"
        " torch.float8_e4m3fn or torch.float8_e5m2",
    ),
    "an FP8 output without a scale": (
        lambda call: {"out": torch.zeros(4, 4, 16).to(FP8[0])},
        ValueError,
        "out_scale = None: expected a scale, as out holds FP8 numbers; 1.0 stores the result"
        " as it is",
    ),
    "an output scale for each head": (
        lambda call: {
            "out": torch.zeros(4, 4, 16).to(FP8[0]),
            "out_scale": torch.ones(4),
        },
        ValueError,
        "out_scale has shape [4]: expected [] or [1]",
    ),
    **{
        f"an output scale of {scale}": (
            lambda call, scale=scale: {
                "out": torch.zeros(4, 4, 16).to(FP8[0]),
                "out_scale": scale,
            },
            ValueError,
            f"out_scale = {float(scale)}: expected a finite number above 0",
        )
        for scale in (0.0, -1.0, float("inf"), torch.tensor([0.0]), torch.tensor(NAN))
    },
    "an output of another value size": (
        lambda call: {"out": torch.zeros(4, 4, 12)},
        ValueError,
        "out has shape [4, 4, 12]: expected [4, 4, 16], queries by the elements of a value",
    ),
    "queries of another head size": (
        lambda call: {"query": torch.zeros(4, 4, 8)},
        ValueError,
        "query has shape [4, 4, 8]: expected [tokens, query_heads, 16], as the keys have",
    ),
    "heads that do not divide": (
        lambda call: {"query": torch.zeros(4, 3, 16)},
        ValueError,
        "num_query_heads = 3 is not a multiple of num_kv_heads = 2",
    ),
    "a log-sum-exp the other way round": (
        lambda call: {"lse": torch.zeros(4, 5)},
        ValueError,
        "lse has shape [4, 5]: expected [4, 4]",
    ),
}
"""What both operations refuse: of 4 tokens, 4 query heads, 2 kv heads, 2 requests."""

PAGED_REFUSALS: dict[str, tuple[Change, type[Exception], str]] = {
    "a tree that is not square": (
        lambda call: {"tree_mask": torch.ones(2, 3, 4, dtype=torch.bool)},
        ValueError,
        "tree_mask has shape [2, 3, 4]: expected [2, tree, tree], a square of new tokens for"
        " each request",
    ),
    "a tree for other requests": (
        lambda call: {"tree_mask": torch.ones(1, 4, 4, dtype=torch.bool)},
        ValueError,
        "tree_mask has shape [1, 4, 4]: expected [2, tree, tree], a square of new tokens for"
        " each request",
    ),
    "a tree in which a token does not see itself": (
        lambda call: {
            "tree_mask": torch.tensor([[1, 0, 0], [1, 0, 0], [1, 0, 1]])
            .bool()
            .repeat(2, 1, 1)
        },
        ValueError,
        "tree_mask[0, 1, 1] = False: expected True, as every new token sees itself",
    ),
    "a tree of numbers": (
        lambda call: {"tree_mask": torch.ones(2, 4, 4)},
        TypeError,
        "tree_mask is torch.float32: expected torch.bool",
    ),
    **{
        f"a tree beside causal {kind}": (
            lambda call, flag=flag: {
                "tree_mask": torch.ones(2, 4, 4, dtype=torch.bool),
                "causal": flag,
            },
            ValueError,
            "tree_mask is given beside causal: expected causal = True, since the mask says"
            " what is seen; a request without a tree has a lower triangle",
        )
        for kind, flag in (("False", False), ("flags", torch.tensor([True, True])))
    },
    **{
        f"{name} beside float32": (
            lambda call, name=name: {name: 1.0},
            ValueError,
            f"{name} is given but the cache is torch.float32: expected None, as only an FP8"
            " cache has scales",
        )
        for name in ("k_scale", "v_scale")
    },
    "more new tokens than keys": (
        lambda call: {"seq_lens": torch.tensor([2, 9], dtype=torch.int32)},
        ValueError,
        "request 0 has 3 queries on 2 keys and is causal: expected its queries to be the last"
        " tokens of its sequence",
    ),
    "more queries than keys in a window": (
        lambda call: {
            "seq_lens": torch.tensor([2, 9], dtype=torch.int32),
            "causal": False,
            "sliding_window": 4,
        },
        ValueError,
        "request 0 has 3 queries on 2 keys and sliding_window is given: expected at most as"
        " many queries as keys, so that each has a position among them",
    ),
    "a bound below the keys": (
        lambda call: {"max_seq_len": 19},
        ValueError,
        "seq_lens[0] = 20: expected at most max_seq_len = 19",
    ),
    "a bound below the queries": (
        lambda call: {"max_query_len": 2},
        ValueError,
        "request 0 has 3 new tokens: expected at most max_query_len = 2",
    ),
}
FP8_REFUSALS: dict[str, tuple[Change, type[Exception], str]] = {
    **{
        f"no {name}": (
            lambda call, name=name: {name: None},
            ValueError,
            f"{name} = None: expected a scale, as the cache is torch.float8_e4m3fn; 1.0 takes"
            " its numbers as they are",
        )
        for name in ("k_scale", "v_scale")
    },
    **{
        f"{name} of {scale}": (
            lambda call, name=name, scale=scale: {name: scale},
            ValueError,
            f"{name} = {number}: expected a finite number above 0",
        )
        for name in ("k_scale", "v_scale")
        for scale, number in (
            (0.0, 0.0),
            (-2.0, -2.0),
            (NAN, NAN),
            (torch.tensor([1.0, 0.0]), 0.0),
            (torch.tensor(float("inf")), float("inf")),
        )
    },
    **{
        f"{name} for other heads": (
            lambda call, name=name: {name: torch.ones(4)},
            ValueError,
            f"{name} has shape [4]: expected [] or [1] or [2]",
        )
        for name in ("k_scale", "v_scale")
    },
    "a scale in float16": (
        lambda call: {"k_scale": torch.ones(2, dtype=torch.float16)},
        TypeError,
        "k_scale is torch.float16: expected torch.float32",
    ),
    "values that are not quantised": (
        lambda call: {"value_cache": call.arguments["value_cache"].float()},
        TypeError,
        "value_cache is torch.float32: expected torch.float8_e4m3fn",
    ),
}


def refuse(
    twin: Twin, call: Call, refusal: tuple[Change, type[Exception], str]
) -> None:
    """Assert that a changed call is refused in these words, and that nothing is written."""
    change, error, words = refusal
    device = call.query.device
    changes = change(call)
    tokens, heads, _ = call.query.shape
    results = {
        "out": torch.full((tokens, heads, 16), 7.0, device=device),
        "lse": torch.full((heads, tokens), 7.0, device=device),
    }
    for name in ("out", "lse"):
        if name in changes:
            given = changes.pop(name)
            results[name] = given if given is None else given.to(device)
    before = [None if each is None else each.clone() for each in results.values()]
    with pytest.raises(error) as caught:
        getattr(twin.raw, call.operation)(**call.changed(**changes).keywords, **results)
    assert str(caught.value) == words
    for one, other in zip(before, results.values(), strict=True):
        assert one is None or same_bits(one, other)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", REFUSALS)
def test_an_option_out_of_range_is_refused(
    name: str, operation: str, twin: Twin, device: torch.device, checked_values: None
) -> None:
    call = paged_call(Plan((3, 1), (20, 9)), device)
    call = call if operation == "paged_attention" else ragged_call(call)
    refuse(twin, call, REFUSALS[name])


@pytest.mark.parametrize("name", PAGED_REFUSALS)
def test_an_option_of_pages_out_of_range_is_refused(
    name: str, twin: Twin, device: torch.device, checked_values: None
) -> None:
    call = paged_call(Plan((3, 1), (20, 9)), device)
    refuse(twin, call, PAGED_REFUSALS[name])


@pytest.mark.parametrize("name", FP8_REFUSALS)
def test_a_scale_out_of_range_is_refused(
    name: str, twin: Twin, device: torch.device, checked_values: None
) -> None:
    call = paged_call(Plan((3, 1), (20, 9)), device)
    refuse(twin, quantised_call(call, FP8[0], 0.1, 0.1), FP8_REFUSALS[name])


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks", "position_bias", "causal"])
def test_an_option_on_another_device_is_refused(
    name: str, twin: Twin, device: torch.device
) -> None:
    tensors = {
        "alibi_slopes": torch.ones(4, device="meta"),
        "sinks": torch.ones(4, device="meta"),
        "position_bias": torch.ones(4, 9, device="meta"),
        "causal": torch.ones(2, dtype=torch.bool, device="meta"),
    }
    words = f"{name} lies on meta: expected {device.type}"
    call = paged_call(Plan((3, 1), (20, 9)), device).changed(**{name: tensors[name]})
    with pytest.raises(ValueError) as caught:
        call.run_both(twin.raw)
    assert str(caught.value).startswith(words)
    assert str(caught.value).endswith(", where query is; move it there first")
