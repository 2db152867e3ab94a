"""Does every token see its whole request, in both directions, without a cache?

Options beside each other: test_option_pairs; edges, laws and refusals that it shares with
paged_attention: test_attention_options.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Twin
from hypothesis import given, settings
from pagetwin.conformance.generators.batches import CORNERS, DTYPES, NAN, Plan, plans
from pagetwin.conformance.generators.options import (
    PLAIN,
    Call,
    bias_table,
    build_call,
    paged_call,
    ragged_call,
    slopes,
    starts_of,
)
from pagetwin.conformance.oracles.dense import same_bits
from pagetwin.contract.attention_options import pack_options
from torch import Tensor

FEWER = settings(max_examples=min(12, settings().max_examples))
SHAPE = Plan((3, 0, 9, 1), (3, 0, 9, 1))


def encoder_call(plan: Plan, device: torch.device, **options: Any) -> Call:
    """Return encoder_attention of a plan's queries and keys, causal as it is by default."""
    return ragged_call(paged_call(plan, device, **options)).changed(
        causal=options.get("causal")
    )


@FEWER
@given(plan=plans(max_reqs=3))
def test_every_row_keeps_its_budget(
    plan: Plan, twin: Twin, reference: Twin, device: torch.device
) -> None:
    if not plan.kv_lens:
        plan = replace(plan, query_lens=(0,), kv_lens=(0,))
    call = encoder_call(plan, device)
    call.assert_right(*call.run(twin), reference)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_token_sees_all_of_its_own_request(
    dtype: torch.dtype, twin: Twin, device: torch.device
) -> None:
    """Keys all alike: every token of a request gets the mean of its values."""
    call = encoder_call(replace(SHAPE, dtype=dtype), device)
    call.arguments["key"].fill_(1.0)
    out, lse = call.run_both(twin)
    for begin, end in ((0, 3), (3, 12), (12, 13)):
        mean = call.arguments["value"][begin:end].float().mean(0)
        mean = mean.repeat_interleave(2, 0).expand(end - begin, -1, -1)
        assert torch.allclose(out[begin:end].float(), mean, atol=0.01)
    assert bool(torch.isfinite(lse).all())


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "flags": {"causal": torch.tensor([True, False, False, True])},
    "window, bias and sinks": {
        "sliding_window": 4,
        "position_bias": bias_table(4),
        "sinks": slopes(4),
    },
    "chunk, cap and ALiBi": {
        "attention_chunk_size": 4,
        "logits_soft_cap": 2.0,
        "alibi_slopes": slopes(4),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_paged_attention_of_the_same_keys(
    name: str, twin: Twin, reference: Twin, device: torch.device
) -> None:
    plan = Plan((33, 0, 2, 9), (33, 0, 2, 9), padding=1)
    paged = paged_call(plan, device, **({"causal": False} | OPTIONS[name]))
    ragged = ragged_call(paged)
    ragged.assert_right(*paged.run_both(twin), reference)
    paged.assert_right(*ragged.run_both(twin), reference)


@pytest.mark.parametrize("order", ["heads", "elements"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fused_projection_needs_no_copy(
    order: str, dtype: torch.dtype, twin: Twin, reference: Twin, device: torch.device
) -> None:
    """Queries, keys and values as slices of one product, side by side or head by head."""
    packed = encoder_call(replace(SHAPE, dtype=dtype, fused=False, group=1), device)
    tensors = [packed.arguments[name] for name in ("query", "key", "value")]
    if order == "heads":
        fused = torch.cat(tensors, dim=1)
        sliced = fused.split([each.shape[1] for each in tensors], dim=1)
    else:
        fused = torch.stack(tensors, dim=3)
        sliced = fused.unbind(3)
    views = dict(zip(("query", "key", "value"), sliced, strict=True))
    assert not any(view.is_contiguous() for view in views.values())
    for one, other in zip(
        packed.run_both(twin), packed.changed(**views).run_both(twin), strict=True
    ):
        assert same_bits(one, other)
    packed.assert_right(*packed.run_both(twin), reference)


def test_a_decoder_asks_an_encoder_of_any_length(
    twin: Twin, reference: Twin, device: torch.device
) -> None:
    """More queries than keys, fewer, and none: an encoder that heard nothing answers 0."""
    call = encoder_call(Plan((5, 1, 3, 0, 20), (3, 40, 0, 7, 1), padding=1), device)
    out, lse = call.run_both(twin)
    call.assert_right(out, lse, reference)
    assert bool((out[6:9] == 0).all()) and bool((lse[:, 6:9] == -torch.inf).all())
    assert bool((out[29:] == 0).all()) and bool((lse[:, 29:] == -torch.inf).all())


@pytest.mark.parametrize("corner", ["head size 80", "head size 128, bf16"])
def test_the_corners_keep_their_budget(
    corner: str, twin: Twin, reference: Twin, device: torch.device
) -> None:
    call = encoder_call(CORNERS[corner], device)
    call.assert_right(*call.run(twin), reference)


def test_what_lies_behind_the_last_request_never_shows(
    twin: Twin, device: torch.device
) -> None:
    choice = PLAIN | {"operation": "encoder_attention", "causal": "no"}
    call = build_call(choice, 1, device)
    own = sum(call.query_lens), sum(call.key_lens)
    longer = call.changed(
        query=with_rows(call.query[: own[0]], 2),
        key=with_rows(call.arguments["key"][: own[1]], 3),
        value=with_rows(call.arguments["value"][: own[1]], 3),
    )
    before = longer.run_both(twin)
    for name in ("query", "key", "value"):
        longer.arguments[name][own[name != "query"] :] = 1e4
    for one, other in zip(before, longer.run_both(twin), strict=True):
        assert same_bits(one, other)
    assert bool((before[0][own[0] :] == 0).all())
    assert bool((before[1][:, own[0] :] == -torch.inf).all())


def with_rows(tensor: Tensor, count: int) -> Tensor:
    spare = torch.full_like(tensor[:1], NAN).expand(count, -1, -1)
    return torch.cat([tensor, spare])


def test_the_inputs_stay_as_they_are(twin: Twin, device: torch.device) -> None:
    call = encoder_call(replace(SHAPE, padding=1), device, sinks=slopes(4))
    tensors = {
        name: value.clone()
        for name, value in call.arguments.items()
        if isinstance(value, Tensor)
    }
    call.run_both(twin)
    for name, value in tensors.items():
        assert same_bits(value, call.arguments[name]), name


def test_every_argument_changes_something(twin: Twin, device: torch.device) -> None:
    call = encoder_call(Plan((3, 4), (9, 20)), device)
    before, lse_before = call.run_both(twin)
    given = call.arguments
    for name, change in {
        "query": given["query"] * 2,
        "key": given["key"] * 2,
        "value": given["value"] * 2,
        "query_start_loc": starts_of([4, 3], device),
        "key_start_loc": starts_of([12, 17], device),
        "scale": 0.9,
    }.items():
        out, lse = call.changed(**{name: change}).run_both(twin)
        assert not torch.allclose(out, before, atol=1e-3), name
        assert torch.allclose(lse, lse_before, atol=1e-3) is (name == "value"), name


def test_upper_bounds_may_lie_above_the_truth(
    twin: Twin, reference: Twin, device: torch.device
) -> None:
    call = encoder_call(Plan((3, 1), (20, 9)), device)
    call = call.changed(max_query_len=64, max_key_len=100)
    call.assert_right(*call.run_both(twin), reference)


def test_no_request_and_no_key_are_no_error(
    twin: Twin, reference: Twin, device: torch.device
) -> None:
    """An encoder whose inputs are all embedded elsewhere gets an empty batch."""
    for lens in ((0,), (0, 0)):
        call = encoder_call(Plan(lens, lens, padding=2), device)
        out, lse = call.run_both(twin)
        assert bool((out == 0).all()) and bool((lse == -torch.inf).all())
    start = torch.zeros(1, dtype=torch.int32, device=device)
    none = call.changed(query_start_loc=start, key_start_loc=start)
    out, lse = none.run_both(twin)
    assert bool((out == 0).all()) and bool((lse == -torch.inf).all())


def test_an_output_is_made_where_none_is_given(
    twin: Twin, device: torch.device
) -> None:
    call = encoder_call(SHAPE, device)
    out, _ = call.run_into(twin, None, False)
    assert out.dtype == call.query.dtype and out.device == call.query.device
    assert same_bits(out, call.run_both(twin)[0])


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "keys in FP8": (
        {"key": torch.zeros(29, 2, 16).to(torch.float8_e4m3fn)},
        TypeError,
        "key is torch.float8_e4m3fn: expected torch.float16 or torch.bfloat16 or"
        " torch.float32 or torch.float64",
    ),
    "values of another dtype": (
        {"value": torch.zeros(29, 2, 16, dtype=torch.float16)},
        TypeError,
        "value is torch.float16: expected torch.float32",
    ),
    "queries of another dtype": (
        {"query": torch.zeros(4, 4, 16, dtype=torch.float16)},
        TypeError,
        "query is torch.float16: expected torch.float32",
    ),
    "fewer values than keys": (
        {"value": torch.zeros(28, 2, 16)},
        ValueError,
        "key has shape [29, 2, 16] and value [28, 2, 16]: expected [tokens, kv_heads,"
        " head_size], alike but for the head size",
    ),
    "keys in two dimensions": (
        {"key": torch.zeros(29, 32)},
        ValueError,
        "key has shape [29, 32] and value [29, 2, 16]: expected [tokens, kv_heads,"
        " head_size], alike but for the head size",
    ),
    "starts of other requests": (
        {"key_start_loc": int32(0, 20)},
        ValueError,
        "key_start_loc has shape [2]: expected [3] (requests + 1)",
    ),
    "starts of 64 bits": (
        {"key_start_loc": int32(0, 20, 29).long()},
        TypeError,
        "key_start_loc is torch.int64: expected torch.int32",
    ),
    "a negative bound": (
        {"max_key_len": -1},
        ValueError,
        "max_key_len = -1: expected at least 0",
    ),
    "starts that fall": (
        {"key_start_loc": int32(0, 20, 9)},
        ValueError,
        "key_start_loc[2] = 9 is less than key_start_loc[1] = 20: expected starts that never"
        " fall",
    ),
    "starts past the keys": (
        {"key_start_loc": int32(0, 20, 30)},
        ValueError,
        "key_start_loc[2] = 30: expected at most 29, the tokens there are",
    ),
    "starts that begin late": (
        {"query_start_loc": int32(1, 3, 4)},
        ValueError,
        "query_start_loc[0] = 1: expected 0",
    ),
    "a bound below the keys": (
        {"max_key_len": 19},
        ValueError,
        "request 0 has 20 keys: expected at most max_key_len = 19",
    ),
    "a bound below the queries": (
        {"max_query_len": 2},
        ValueError,
        "request 0 has 3 queries: expected at most max_query_len = 2",
    ),
    "more queries than keys and a bias": (
        {"key_start_loc": int32(0, 2, 29), "max_key_len": 27, "sliding_window": 3},
        ValueError,
        "request 0 has 3 queries on 2 keys and sliding_window is given: expected at most as"
        " many queries as keys, so that each has a position among them",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_bad_call_is_refused_before_anything_is_written(
    name: str, twin: Twin, device: torch.device, checked_values: None
) -> None:
    changes, error, words = REFUSALS[name]
    call = encoder_call(Plan((3, 1), (20, 9)), device)
    out = torch.full((4, 4, 16), 7.0, device=device)
    with pytest.raises(error) as caught:
        twin.raw.encoder_attention(
            out=out, **pack_options(**call.changed(**changes).arguments)
        )
    assert str(caught.value) == words
    assert bool((out == 7).all())
