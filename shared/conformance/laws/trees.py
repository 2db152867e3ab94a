"""Laws of tree attention with a different draft tree per request.

A batch has trees of several shapes. It may also have a request without a tree, whose new tokens
exceed the width of the mask. Mask entries outside a tree hold garbage. Options that depend on
positions count along the branches.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from ..candidates.calls.calling import expect_right, run_call
from ..candidates.setting import Setting
from ..cases.batches import DTYPES, BatchPlan
from ..cases.options import bias_table, paged_call, slopes, tree_of
from ..cases.reuse import compiled
from .law import law


@dataclass(frozen=True)
class Grove:
    """One draft tree per request.

    Args:
        plan: Batch with the new tokens and keys of each request.
        parents: [reqs] parent of each new token; -1 for a root.
        width: Width of the tree mask.
        option: Additional option of the call: a key of OPTIONS, "slopes" or "a bias".
    """

    plan: BatchPlan
    parents: tuple[tuple[int, ...], ...]
    width: int
    option: str


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a window": {"sliding_window": 3},
    "chunks": {"attention_chunk_size": 8},
    "a cap": {"logits_soft_cap": 2.0},
}


def draw_parents(pick: Random, count: int) -> tuple[int, ...]:
    """Return the parents of `count` tokens: a chain, a star or a random forest."""
    kind = pick.choice(["chain", "bush", "any", "any"])
    if kind == "chain":
        return tuple(range(-1, count - 1))
    if kind == "bush":
        return tuple(min(0, token - 1) for token in range(count))
    return tuple(pick.randrange(-1, token) for token in range(count))


@st.composite
def groves(draw: st.DrawFn) -> Grove:
    """Return trees of several sizes. The whole case is drawn from one seed."""
    pick = Random(draw(st.integers(0, 2**20)))
    kernel = compiled(pick)
    news = [pick.choice([1, 2, 3, 5, 7]) for _ in range(pick.choice([2, 3]))]
    width = max(news) + pick.choice([0, 0, 2])
    if pick.random() < 0.3:
        news[pick.randrange(len(news))] = width + pick.choice([1, 4, 30])
    contexts = [pick.choice([0, 1, 15, 16, 31, 40, 64, 100]) for _ in news]
    plan = BatchPlan(
        tuple(news),
        tuple(new + context for new, context in zip(news, contexts, strict=True)),
        kv_heads=kernel.choice([1, 2]),
        group=kernel.choice([1, 2, 3]),
        dtype=kernel.choice(DTYPES),
        needle=pick.choice(["none", "last", "first new"]),
        padding=pick.choice([0, 2]),
        seed=pick.randrange(2**16),
    )
    parents = tuple(draw_parents(pick, new) for new in news)
    return Grove(plan, parents, width, kernel.choice([*OPTIONS, "slopes", "a bias"]))


@law("paged_attention", cases=groves())
def every_request_has_its_own_tree_mask(setting: Setting, grove: Grove) -> None:
    heads = grove.plan.kv_heads * grove.plan.group
    generator = torch.Generator().manual_seed(grove.plan.seed)
    shape = (len(grove.parents), grove.width, grove.width)
    mask = torch.randint(0, 2, shape, generator=generator).bool()
    for req, parents in enumerate(grove.parents):
        if len(parents) <= grove.width:
            tree = tree_of([None if parent < 0 else parent for parent in parents])
            mask[req, : len(parents), : len(parents)] = tree
    options = OPTIONS | {
        "slopes": {"alibi_slopes": slopes(heads)},
        "a bias": {"position_bias": bias_table(heads)},
    }
    call = paged_call(
        grove.plan, setting.device, tree_mask=mask, **options[grove.option]
    )
    expect_right(setting, call, run_call(setting, call))


@law("paged_attention", cases=[(200, 70, 126), (200, 70, 129), (170, 33, 138)])
def a_key_before_the_window_of_a_row_of_a_large_tree_is_masked(
    setting: Setting, case: tuple[int, int, int]
) -> None:
    """96 rows, more than a tile of a decode. The window of only the first tokens has the key."""
    kv_len, window, key = case
    plan = BatchPlan((6,), (kv_len,), kv_heads=1, group=16, head_size=8)
    tree = tree_of([None, 0, 0, 1, 2, 4])[None]
    options: dict[str, Any] = {"tree_mask": tree, "sliding_window": window}
    call = paged_call(plan, setting.device, [(0, key)], **options)
    expect_right(setting, call, run_call(setting, call))
