"""Checks of the kernels for Hopper that compare one call with another, in the interpreter."""

from dataclasses import replace

import pytest
import torch
from pagetwin.conformance.checks.dense import same_bits
from pagetwin.gluon_interpreter.programs import Program

from support.hopper import (
    CASES,
    Case,
    fresh,
    launch,
    make_batch,
    plan_of,
    pretend_hopper,
)
from support.hopper_fp8 import spread
from support.twins import Twin

FAR = [
    (axis, name)
    for axis in ("token", "lse head", "lse token", "table row")
    for name in (
        "prefill, padding, padded heads, three to a tile",
        "append, several segments",
    )
] + [(axis, "copied latent, few blocks") for axis in ("table row", "block", "slot")]
"""Axes with long strides, and calls that they are tried in."""


def check_far(axis: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of rows of requests and of padding, of rows of the block table, and of latents."""
    # it would keep a number per element of so large a tensor
    monkeypatch.setattr(Program, "note_store", lambda *_: None)
    batch = make_batch(CASES[name])
    out, lse = fresh(batch)
    far = batch
    if axis == "table row":
        far = replace(batch, block_table=spread(batch.block_table, 0, 2**31))
    elif axis in ("block", "slot"):
        # also the blocks in the middle are far away, since requests may not have the last ones
        cache = spread(batch.key_cache, ("block", "slot").index(axis), 2**32)
        far = replace(batch, key_cache=cache, value_cache=cache[..., :512])
    elif axis.startswith("lse"):
        lse = spread(lse, ("lse head", "lse token").index(axis), 2**31)
    else:
        out = spread(out, 0, 2**31)
    with pretend_hopper(monkeypatch):
        expected = launch(CASES[name], batch)
        found = launch(CASES[name], far, (out, lse))
    for one, other in zip(expected, found, strict=True):
        assert not bool(one.isnan().any()) and same_bits(one, other)


def check_orders(case: Case, lateness: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two orders of roles, programs and copies give the same bits."""
    batch = make_batch(case)
    results = []
    for seed in (1, 2):
        with pretend_hopper(monkeypatch, seed, lateness=lateness, pause_rate=0.3):
            results.append(launch(case, batch))
    for one, other in zip(*results, strict=True):
        assert not bool(one.isnan().any()) and same_bits(one, other)


def check_rows_past_a_bound(reference: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows past a bound that is too small harm no other request."""
    """Partial results have memory for 3 tokens. One request has 6: those are not stored."""
    plan = plan_of((3, 6, 2), (700, 700, 300), 128, group=4, padding=2)
    case = Case("append", plan, processors=7)
    batch = make_batch(case)
    with pretend_hopper(monkeypatch):
        out, lse = launch(case, replace(batch, max_query_len=3))
    right, right_lse = batch.fresh()
    reference.paged_attention(**batch.arguments(), out=right, lse=right_lse)
    for rows in (slice(0, 3), slice(9, 13)):
        torch.testing.assert_close(out[rows], right[rows], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(
            lse[:, rows], right_lse[:, rows], atol=1e-4, rtol=1e-4
        )
