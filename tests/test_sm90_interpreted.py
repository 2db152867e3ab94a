"""The kernels for Hopper, run on the CPU role by role (gluon_interpreter).

A GPU shows whether results are right; these tests also fail where a kernel is right by luck: shared
memory that is read before it is waited for, or overwritten while a product or copy reads it. They
do not replace the tests on a GPU: registers, layouts and the compiler are not interpreted.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import TWINS, Twin
from gluon_interpreter import interpret_gluon
from hopper import Case, check, launch, make_batch, pretend_hopper
from pagetwin.conformance.generators.batches import BatchPlan
from pagetwin.conformance.oracles.dense import same_bits
from pagetwin.optimized.kernels.sm90.invariant import family as invariant

BF16, FP16 = torch.bfloat16, torch.float16


def plan_of(
    query_lens: tuple[int, ...], kv_lens: tuple[int, ...], head_size: int, **given: Any
) -> BatchPlan:
    """Return a batch of bfloat16 with one KV head."""
    given = {"dtype": BF16, "kv_heads": 1, "group": 2, **given}
    return BatchPlan(query_lens, kv_lens, head_size=head_size, **given)


RAGGED = (70, 1, 0, 130), (200, 50, 40, 131)
CASES = {
    f"prefill, head size {size}": Case("prefill", plan_of(*RAGGED, size, needle="last"))
    for size in (64, 80, 96, 128, 192, 256)
} | {
    "prefill, float16, whole tiles": Case(
        "prefill", plan_of((192,), (300,), 64, dtype=FP16, group=1, padding=3)
    ),
    "prefill, windows": Case(
        "prefill", plan_of((130,), (390,), 128, needle="tile edge"),
        {"sliding_window": 100},
    ),
    "prefill, head size 64, windows": Case(
        "prefill", plan_of((130,), (390,), 64, needle="first new"),
        {"sliding_window": 70, "sinks": True},
    ),
    "prefill, chunks": Case(
        "prefill", plan_of((130,), (290,), 128, group=3), {"attention_chunk_size": 100}
    ),
    "prefill, soft cap": Case(
        "prefill", plan_of((66,), (150,), 128), {"logits_soft_cap": 3.0}, False
    ),
    "prefill, not causal": Case(
        "prefill", plan_of((66, 5), (150, 130), 64), {"causal": False}
    ),
    "prefill, blocks of 48": Case(
        "prefill", plan_of((66,), (150,), 128, block_size=48, needle="block edge")
    ),
    "append, several segments": Case(
        "append", plan_of((6, 3), (700, 40), 128, group=4, needle="tile edge", padding=3)
    ),
    "append, head size 64, sinks": Case(
        "append", plan_of((6, 0, 70), (1000, 9, 300), 64, needle="first new"),
        {"sinks": True},
    ),
    "append, window": Case(
        "append", plan_of((20, 1), (900, 400), 128, group=3), {"sliding_window": 300}
    ),
    "append, head size 256": Case("append", plan_of((6,), (300,), 256)),
    "invariant": Case(
        "invariant", plan_of((40, 1, 0, 20), (300, 700, 9, 20), 128, padding=3)
    ),
    "invariant, head size 64, sinks": Case(
        "invariant", plan_of((5, 3), (300, 600), 64, needle="tile edge"), {"sinks": True}
    ),
    "latent": Case(
        "latent", plan_of((1, 0, 4, 1), (200, 5, 131, 64), 576, group=16, padding=2)
    ),
    "latent, two row tiles, several segments": Case(
        "latent", plan_of((2,), (700,), 576, group=40, block_size=64, needle="tile edge")
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split batch-invariant rows after 256 keys, so that short ones have several splits."""
    monkeypatch.setattr(invariant, "SPLIT_KEYS", 256)


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_within_its_error_budget(
    name: str, reference: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretend_hopper(monkeypatch):
        check(CASES[name], reference)
