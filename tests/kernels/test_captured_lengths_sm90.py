"""Launches of the kernels for Hopper that were planned for other lengths, as captured ones are.

A captured launch keeps the path, the grid and the bounds of its capture. The lengths of each replay
are on the device. Here every batch has the same tokens, requests and bounds, so each call plans
what a capture of the longest batch would have planned. The kernels run in the Gluon interpreter.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan, build
from pagetwin.conformance.checks.dense import judge_attention, judge_lse
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.kernels.portable.host.plans import PortableDecodePlan
from pagetwin.optimized.kernels.sm90.append import family as append
from support import fp8_calls as fp8
from support.forced_choices import no_launch_for_all, one_launch_for_all
from support.hopper import COUNTERS, NAN, pretend_hopper
from support.hopper_checks import check_rows_past_a_bound
from support.hopper_fp8 import pretend_fp8_hopper
from support.twins import TWINS, Twin

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="it is the run without a GPU that is tried"
    ),
]
BLOCK_SIZE = 16


class Capture(NamedTuple):
    """What was known when the launches were planned.

    Args:
        segments: segments of a KV head if one launch computes all requests; None for prefills.
        made: kernels that are launched.
        reqs, tokens: of the batch, with padding.
        max_query_len, max_seq_len: its bounds.
        lengths: new tokens and keys of each request, per replay.
        group: query heads per KV head.
        is_fp8: whether the cache is in FP8.
    """

    segments: int | None
    made: tuple[str, ...]
    reqs: int
    tokens: int
    max_query_len: int
    max_seq_len: int
    lengths: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    group: int = 2
    is_fp8: bool = False


LONG = (
    ((66, 66), (200, 66)),
    ((0, 0), (0, 200)),
    ((1, 0), (1, 200)),
    ((0, 66), (130, 128)),
    ((8, 9), (129, 9)),
)
CAPTURES = {
    "prefills without a decode launch": Capture(
        None, ("prefill_kernel",), 2, 132, 66, 200, LONG
    ),
    "prefills from an FP8 cache without a decode launch": Capture(
        None, ("upcast_kernel", "prefill_kernel"), 2, 132, 66, 200, LONG, is_fp8=True
    ),
    "appends with one warpgroup": Capture(
        3, ("append_kernel",), 3, 40, 16, 700,
        (
            ((16, 16, 8), (700, 300, 8)),
            ((0, 0, 0), (0, 700, 1)),
            ((0, 1, 0), (5, 1, 0)),
            ((1, 0, 1), (257, 0, 128)),
            ((0, 0, 16), (0, 9, 700)),
        ),
        group=4,
    ),
    "appends with two warpgroups": Capture(
        99, ("append_kernel",), 3, 70, 33, 700,
        (
            ((33, 33, 4), (700, 300, 8)),
            ((0, 0, 0), (0, 700, 1)),
            ((32, 1, 0), (129, 1, 0)),
            ((1, 0, 17), (256, 0, 400)),
        ),
        group=3,
    ),
}  # fmt: skip


def replay(capture: Capture, number: int, reference: Twin, made: Any) -> None:
    """Call the twin with the lengths of a replay, and compare all rows with float64.

    Args:
        made: names of the kernels that were launched.
    """
    query_lens, kv_lens = capture.lengths[number]
    columns = -(-capture.max_seq_len // BLOCK_SIZE)
    plan = BatchPlan(
        query_lens, kv_lens, block_size=BLOCK_SIZE, kv_heads=1, group=capture.group,
        head_size=128, dtype=torch.float16, padding=capture.tokens - sum(query_lens),
        spare_blocks=columns, needle="last", seed=2 * number,
    )  # fmt: skip
    batch = fp8.make_batch(plan, device="cpu") if capture.is_fp8 else build(plan)
    assert (batch.query.shape[0], len(query_lens)) == (capture.tokens, capture.reqs)
    assert batch.max_query_len <= capture.max_query_len
    batch = replace(
        batch, max_query_len=capture.max_query_len, max_seq_len=capture.max_seq_len
    )
    options = AttentionOptions(causal=True)
    if capture.is_fp8:
        options = fp8.make_options(batch)
    out, lse = batch.fresh()
    TWINS["optimized"].raw.paged_attention(
        **batch.arguments(), out=out, lse=lse, options=options
    )
    assert tuple(made) == capture.made
    assert not any(bool(counter.any()) for counter in COUNTERS)
    assert bool((out[batch.tokens :] == 0).all())
    assert bool((lse[:, batch.tokens :] == -torch.inf).all())
    if capture.is_fp8:
        fp8.assert_right(batch, out, lse, reference, options)
        return
    attend = partial(reference.paged_attention, options=options)
    verdict, exact_lse = judge_attention(
        batch, out, SimpleNamespace(paged_attention=attend)
    )
    assert verdict.ok, verdict
    assert judge_lse(batch, lse, exact_lse) <= 1


@pytest.mark.parametrize(
    ("name", "number"),
    [
        (name, at)
        for name, planned in CAPTURES.items()
        for at in range(len(planned.lengths))
    ],
)
def test_a_captured_launch_is_right_for_all_shorter_lengths(
    name: str, number: int, reference: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for requests of no token, of one, and of no key, and for a batch of padding alone."""
    capture = CAPTURES[name]
    monkeypatch.setattr(append, "count_processors", lambda _: 6)

    def launch_decode(*_: Any) -> None:
        pytest.fail("a decode launch was made")

    monkeypatch.setattr(PortableDecodePlan, "launch", launch_decode)
    pretend = pretend_fp8_hopper if capture.is_fp8 else pretend_hopper
    segments = capture.segments
    forced = no_launch_for_all() if segments is None else one_launch_for_all(segments)
    with forced, pretend(monkeypatch, seed=number) as launches:
        replay(capture, number, reference, launches.made)


@pytest.mark.parametrize(
    "lengths",
    [
        ((66, 66), (129, 128)),
        ((66, 1), (0, 300)),
        ((0, 9), (7, 1)),
        ((0, 0), (40, 0)),
    ],
)
def test_a_captured_cross_attention_is_right_for_other_lengths(
    lengths: tuple[tuple[int, int], tuple[int, int]],
    reference: Twin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two requests of up to 66 tokens and 300 keys. Tokens and keys of no request are NaN."""
    query_lens, key_lens = lengths
    chance = torch.Generator().manual_seed(sum(key_lens))
    query, key, value = (
        torch.randn(tokens, heads, 64, generator=chance).half()
        for tokens, heads in ((132, 2), (300, 1), (300, 1))
    )
    query[sum(query_lens) :] = NAN
    key[sum(key_lens) :] = value[sum(key_lens) :] = NAN
    starts, key_starts = (
        torch.tensor([0, *lens]).cumsum(0).int() for lens in (query_lens, key_lens)
    )
    call = query, key, value, starts, key_starts, 66, 300
    options = AttentionOptions(causal=False, sinks=torch.tensor([0.5, -2.0]))
    results = []
    with no_launch_for_all(), pretend_hopper(monkeypatch) as launches:
        for attend in (TWINS["optimized"].raw, reference.raw):
            out, lse = torch.full_like(query, NAN), torch.full((2, 132), NAN)
            attend.encoder_attention(*call, out=out, lse=lse, options=options)
            results.append((out, lse))
    assert launches.made == ["prefill_kernel"]
    (out, lse), (right, right_lse) = results
    torch.testing.assert_close(out, right, atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(lse, right_lse, atol=1e-4, rtol=1e-4)


def test_rows_past_a_bound_that_is_too_small_harm_no_other_request(
    reference: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rows_past_a_bound(reference, monkeypatch)
