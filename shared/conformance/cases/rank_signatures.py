"""Signatures of operations of several ranks, and batches that share one.

The signature is that of a call on one rank, whose result is compared, with a `RankLayout`. Options
that the operation does not take are plain in it.
"""

from dataclasses import replace
from math import gcd
from random import Random

from hypothesis import strategies as st

from .option_pairs import PLAIN
from .ranks import GATHER, RING, STEP, RankLayout
from .signatures import (
    SMALL,
    Limits,
    Signature,
    SignedBatch,
    draw_batch,
    draw_signature,
)
from .views import Views

MAX_RANKS = 8
"""Ranks of a signature, at most."""
WORLD_SIZES = (1, 2, 2, 3, 3, 4, 4, 5, 6, 7, MAX_RANKS)
MAX_SPLITS = 8
"""Fixed splits of a signature, at most: each is a request per new token."""
NEW_TOKENS = 5
"""New tokens of a request of a STEP, at most: each is a request of its own on every rank."""
_SIZES = ("operation", "dtype", "out", "lse", "block_size", "group", "head_size")
_ALWAYS = (*_SIZES, "query", "scale", "value_head_size", "logits_soft_cap", "sinks")
_BY_POSITION = (
    "sliding_window",
    "attention_chunk_size",
    "alibi_slopes",
    "position_bias",
)
TAKEN = {
    STEP: (*_ALWAYS, "batch", "layout", "cache", "scales", "batch_invariant"),
    GATHER: (*_ALWAYS, *_BY_POSITION, "batch_invariant"),
    RING: _ALWAYS,
}
"""Options that each operation takes. All others are plain."""


def draw_rank_signature(seed: int, limits: Limits, operation: str) -> Signature:
    """Return a random signature of an operation. Equal arguments give equal signatures."""
    pick = Random(f"ranks {seed} {operation}")
    signature = draw_signature(pick.randrange(2**31), limits)
    signature = replace(signature, views=Views())  # each rank makes its own tensors
    choice = dict(PLAIN)
    choice |= {name: signature.choice[name] for name in TAKEN[operation]}
    if choice["out"] not in ("given", "made"):
        choice["out"] = "given"
    if operation != STEP:
        ranks = RankLayout(operation, pick.choice(WORLD_SIZES))
        choice["batch"] = "prefill"
        longest = 2 * limits.max_query_len
        return replace(
            signature,
            choice=choice,
            ranks=ranks,
            max_query_len=longest,
            max_key_len=longest,
        )
    ranks, kv_heads, group = _draw_step(pick, int(choice["block_size"]))
    choice["group"] = str(group)
    if ranks.splits is None:
        choice["batch_invariant"] = PLAIN["batch_invariant"]
    return replace(
        signature,
        choice=choice,
        ranks=ranks,
        kv_heads=kv_heads,
        max_query_len=min(signature.max_query_len, NEW_TOKENS),
    )


def _draw_step(pick: Random, block_size: int) -> tuple[RankLayout, int, int]:
    """Return the ranks of a STEP, its KV heads, and the query heads that share one."""
    world_size = pick.choice(WORLD_SIZES)
    kv_heads, tp_world_size = pick.choice([1, 2]), world_size
    group = world_size // gcd(world_size, kv_heads) * pick.choice([1, 1, 2])
    if pick.random() < 0.4:
        # fewer KV heads than ranks: each is stored on several ranks, which share its keys
        kv_heads = pick.choice([1, 2, 3])
        copies = world_size * pick.choice([1, 1, 2])
        if kv_heads * copies <= MAX_RANKS:
            tp_world_size = kv_heads * copies
            group = copies * pick.choice([1, 2])
        else:
            group = world_size
    divisors = [
        divisor for divisor in range(1, block_size + 1) if block_size % divisor == 0
    ]
    interleave_size = pick.choice([1, block_size, *divisors, *divisors])
    splits = None
    if pick.random() < 0.3:
        drawn = [
            (world_size * interleave_size // run * times, run)
            for run in divisors
            if interleave_size % run == 0
            for times in (1, 2)
        ]
        splits = pick.choice([split for split in drawn if split[0] <= MAX_SPLITS])
    exchange = "all_to_all" if splits else pick.choice(["all_to_all", "reduce_scatter"])
    ranks = RankLayout(
        STEP, world_size, tp_world_size, interleave_size, exchange, splits
    )
    return ranks, kv_heads, group


def draw_rank_batch(signature: Signature, index: int) -> SignedBatch:
    """Return one of a signature's batches. Equal arguments give equal batches.

    A prompt has as many keys as new tokens, and no row is padding.
    """
    batch = draw_batch(signature, index)
    if not signature.has_prompts:
        return batch
    lens = tuple(
        keys if new else 0
        for new, keys in zip(batch.query_lens, batch.key_lens, strict=True)
    )
    needles = tuple(
        min(needle, keys - 1) for needle, keys in zip(batch.needles, lens, strict=True)
    )
    return replace(batch, query_lens=lens, key_lens=lens, needles=needles, padding=0)


@st.composite
def signed_rank_batches(draw: st.DrawFn, operation: str) -> SignedBatch:
    """Return a batch of one of eight signatures."""
    seed = draw(st.integers(0, 2**20))
    return draw_rank_batch(draw_rank_signature(seed % 8, SMALL, operation), seed)
