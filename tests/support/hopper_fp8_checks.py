"""Checks of the FP8 kernels for Hopper that compare one call with another, in the interpreter."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pagetwin.conformance.checks.dense import same_bits
from pagetwin.optimized.kernels.sm90.code_prefill import family as code_prefill

from support.fp8_calls import to_call
from support.hopper_fp8 import (
    CASES,
    E4M3,
    E5M2,
    launch,
    make_call,
    pretend_fp8_hopper,
    spread,
)

AXES = ("block", "slot", "head")
FAR = [
    *(
        (axis, "two requests")
        for axis in ("block", "slot", "table entry", "token", "query head")
    ),
    *(
        (axis, "prefill, three KV heads")
        for axis in (*AXES, "table entry", "table row")
    ),
]
"""Axes with long strides, and calls that they are tried in."""


def queries_without_keys_get_0_and_lse_minus_infinity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, options = make_call(CASES["four requests"])
    batch.seq_lens.zero_()
    batch.block_table.fill_(2**31 - 1)
    with pretend_fp8_hopper(monkeypatch):
        out, lse = launch(batch, replace(options, causal=False))
    assert not bool(out.any()) and bool((lse == -torch.inf).all())


def a_call_without_a_log_sum_exp_has_the_same_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, options = make_call(CASES["four requests"])
    with pretend_fp8_hopper(monkeypatch):
        out, _ = launch(batch, options)
        alone, lse = launch(batch, options, has_lse=False)
    assert same_bits(out, alone) and bool(lse.isnan().all())


def an_fp8_output_is_the_float32_output_rounded_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, options = make_call(CASES["four requests"])
    largest = torch.finfo(dtype).max
    with pretend_fp8_hopper(monkeypatch):
        exact, exact_lse = launch(batch, options, out_dtype=torch.float32)
        # the largest numbers are outside
        scale = exact.abs().max() / (2 * largest)
        out, lse = launch(batch, replace(options, out_scale=scale), out_dtype=dtype)
    assert same_bits(out, (exact / scale).clamp(-largest, largest).to(dtype))
    assert same_bits(lse, exact_lse)


def a_block_table_with_a_stride_of_columns_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Offsets then have 64 bits."""
    batch, options = make_call(CASES["blocks of 48, needle block edge"])
    wide = batch.block_table.repeat_interleave(2, 1)
    wide[:, 1::2] = 2**31 - 1
    with pretend_fp8_hopper(monkeypatch):
        expected, expected_lse = launch(batch, options)
        out, lse = launch(replace(batch, block_table=wide[:, ::2]), options)
    assert same_bits(out, expected) and same_bits(lse, expected_lse)


def offsets_of_more_than_32_bits_change_no_bit(
    axis: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, options = make_call(CASES[name])
    if axis in ("table row", "table entry"):
        number = ("table row", "table entry").index(axis)
        far = replace(batch, block_table=spread(batch.block_table, number, 2**31))
    elif axis in ("token", "query head"):
        number = ("token", "query head").index(axis)
        far = replace(batch, query=spread(batch.query, number, 2**31))
    else:
        # an offset of 2**31 words of 4 numbers
        key, value = (
            spread(cache, AXES.index(axis), 2**33)
            for cache in (batch.key_cache, batch.value_cache)
        )
        far = replace(batch, key_cache=key, value_cache=value)
    with pretend_fp8_hopper(monkeypatch):
        expected, found = (
            launch(given, options, CASES[name].is_prefill) for given in (batch, far)
        )
    for one, other in zip(expected, found, strict=True):
        assert not bool(one.isnan().any()) and same_bits(one, other)


def a_cache_with_a_stride_of_elements_is_converted_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, options = make_call(CASES["prefill, blocks of 48, window"])
    wide = batch.key_cache.view(torch.uint8).repeat_interleave(2, -1)
    wide[..., 1::2] = 0x7F
    results = []
    with pretend_fp8_hopper(monkeypatch) as launches:
        for key in (batch.key_cache, wide.view(E4M3)[..., ::2]):
            out, lse = batch.fresh()
            call = to_call(replace(batch, key_cache=key), options, out, lse)
            code_prefill.plan(call).launch_prefill(call, 0)
            results.append((out, lse))
    assert launches.made == ["upcast_kernel", "prefill_kernel"] * 2
    for one, other in zip(*results, strict=True):
        assert not bool(one.isnan().any()) and same_bits(one, other)


def _named(
    check: Callable[..., None], *arguments: Any
) -> tuple[str, Callable[..., None]]:
    words = check.__name__.replace("_", " ")
    return ", ".join([words, *map(str, arguments)]), partial(check, *arguments)


CHECKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = dict(
    [
        _named(queries_without_keys_get_0_and_lse_minus_infinity),
        _named(a_call_without_a_log_sum_exp_has_the_same_output),
        _named(an_fp8_output_is_the_float32_output_rounded_once, E4M3),
        _named(an_fp8_output_is_the_float32_output_rounded_once, E5M2),
        _named(a_block_table_with_a_stride_of_columns_changes_no_bit),
        _named(a_cache_with_a_stride_of_elements_is_converted_alike),
        *(_named(offsets_of_more_than_32_bits_change_no_bit, *far) for far in FAR),
    ]
)
"""By what is true of the two calls."""
