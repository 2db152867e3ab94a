"""Batches of latents of 512 + 64 elements, and the check of their rows."""

from dataclasses import replace

import torch
from pagetwin.conformance.cases.batches import BatchPlan, BatchTensors, build
from pagetwin.conformance.cases.latent_batches import LatentPlan
from pagetwin.contract.attention_options import AttentionOptions
from torch import Tensor

from support.sm90_calls import assert_rows_right
from support.twins import Twin

NAN = float("nan")
WIDTH, VALUES = 576, 512
BF16 = torch.bfloat16


def make_batch(plan: BatchPlan) -> BatchTensors:
    """Return a batch whose values are the first columns of its keys.

    Args:
        plan: `group` is the number of query heads. "padded" is a cache of rows of 640 elements.
    """
    wide = plan.layout == "padded"
    plan = replace(plan, kv_heads=1, head_size=WIDTH, fused=False, layout="separate")
    batch = build(plan, "cuda")
    cache = batch.key_cache
    if wide:
        cache = cache.new_full((*cache.shape[:3], 640), NAN)[..., :WIDTH]
        cache.copy_(batch.key_cache)
    return replace(batch, key_cache=cache, value_cache=cache[..., :VALUES])


def assert_right(
    batch: BatchTensors, out: Tensor, lse: Tensor, reference: Twin
) -> None:
    """Assert that the rows of each token and head are within their error budgets."""
    sizes = batch.value_cache.abs()
    assert_rows_right(batch, out, lse, reference, AttentionOptions(), sizes)


BATCHES = {
    "one key": BatchPlan((1,), (1,)),
    "one tile": BatchPlan((1,), (64,), needle="last"),
    "one tile and a key": BatchPlan((1,), (65,), needle="last"),
    "two tiles": BatchPlan((1,), (128,), needle="tile edge"),
    "a key less": BatchPlan((1,), (127,), block_size=64, needle="block edge"),
    "ragged": BatchPlan(
        (1, 1, 1, 0, 1, 1, 1), (50, 200, 1, 40, 64, 129, 63), needle="last", padding=3
    ),
    "one to four query tokens": BatchPlan(
        (2, 1, 4, 3, 0, 1, 4), (300, 700, 4, 65, 5, 1, 131), needle="first new", seed=1
    ),
    "blocks of 32": BatchPlan((1, 2), (333, 70), block_size=32, needle="block edge"),
    "blocks of 48": BatchPlan((1, 2), (333, 70), block_size=48, needle="block edge"),
    "blocks of 64": BatchPlan((1, 4), (333, 70), block_size=64, padding=2, seed=1),
    "blocks of 256": BatchPlan((1, 2), (600, 70), block_size=256, needle="first"),
    "rows of 640": BatchPlan((1, 2), (333, 64), layout="padded", needle="last"),
    "shared blocks": BatchPlan((1, 1), (333, 400), table="shared prefix"),
    "many splits": BatchPlan((1,), (5000,), block_size=64, needle="tile edge"),
    "many splits of four tokens": BatchPlan(
        (4,), (3201,), block_size=64, needle="first"
    ),
    "a long request beside short ones": BatchPlan(
        (1,) * 41, (3000,) + (70,) * 40, needle="first"
    ),
    "more requests than are counted at once": BatchPlan(
        (1, 2) * 130, (2, 3, 65, 17) * 65, needle="last"
    ),
    "bounds above the maxima": BatchPlan((1, 2), (333, 70), spare_max=2, scale=0.1),
    "a chunk beside decodes": BatchPlan(
        (1,) * 70 + (301,) + (2,) * 9,
        (900,) * 40 + (70,) * 30 + (900,) * 10,
        needle="last",
    ),
    "chunks of several lengths": BatchPlan(
        (7, 90, 0, 33, 500),
        (300, 90, 5, 700, 511),
        block_size=64,
        padding=3,
        needle="first new",
    ),
}
LATENTS = LatentPlan(
    (1, 2, 0, 4, 1), (130, 64, 5, 65, 1), rank=512, rope=64, padding=2, dtype=BF16
)
