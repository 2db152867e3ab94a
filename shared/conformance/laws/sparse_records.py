"""Laws of sparse attention over latents that are stored as records of bytes.

The expected result is exact attention over the numbers that the bytes of the named records mean.
All bytes of records that no token names are NaN, as codes and as scales.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...contract.latent_formats import LATENT_FORMATS
from ..base.support import OutsideSupport
from ..candidates.setting import Setting
from ..checks.canaries import kept
from ..checks.expect import expect_rejection
from ..checks.record_caches import empty_records, on_device, put_record
from ..oracles.brute_force import Answer, OracleRequest, attend_by_hand
from ..oracles.latent_formats import load_by_hand, store_by_hand
from .law import law
from .sparse_attention import ATTEND, SparseCall, SparsePlan, draw_rows, expect_sparse


@dataclass(frozen=True)
class RecordCall(SparseCall):
    """A call over records.

    Args:
        numbers: [slots, width] float64, what the named records mean; NaN elsewhere.
        rank: Elements of a latent.
    """

    numbers: Tensor
    rank: int

    @property
    def value_size(self) -> int:
        """Elements of a value, which is a latent."""
        return self.rank

    def answer(self) -> Answer:
        """Return the exact result."""
        query, key = self.query.cpu(), self.numbers[:, None]
        requests = [
            OracleRequest(
                query[token : token + 1], key[row], key[row][..., : self.rank]
            )
            for token, row in enumerate(self.rows)
        ]
        return attend_by_hand(requests, {"causal": False}, len(self.rows))


def build_records(name: str, plan: SparsePlan, device: torch.device) -> RecordCall:
    """Return the tensors of a plan with one KV head. The format gives the sizes.

    Records of every second named slot have latents that are 1,000 times smaller.
    """
    form, generator = LATENT_FORMATS[name], torch.Generator().manual_seed(plan.seed)
    rows, slots, needle = draw_rows(plan)
    cache = empty_records(form, plan.num_blocks, plan.block_size, torch.device("cpu"))
    shape = (len(plan.lens), plan.group, form.width)
    query = torch.randn(shape, generator=generator).to(plan.dtype)
    named = sorted({slot for row in rows for slot in row})
    latents = torch.randn(len(named), form.width, generator=generator)
    latents[1::2, : form.kv_lora_rank] *= 1e-3
    latents[named.index(needle)] = query[0, 0].float()
    parts = torch.split(latents, [form.kv_lora_rank, form.qk_rope_head_dim], 1)
    stored = store_by_hand(form.name, *parts)
    size = plan.num_blocks * plan.block_size
    numbers = torch.full((size, form.width), float("nan"), dtype=torch.float64)
    numbers[named] = load_by_hand(form.name, stored).double()
    for slot, record in zip(named, stored, strict=True):
        put_record(form, cache, slot, record)
    records = on_device(cache, device)[:, :, None]
    return RecordCall(
        plan, query.to(device), records, records, rows, slots.to(device), {}, numbers,
        form.kv_lora_rank,
    )  # fmt: skip


def expect_records(setting: Setting) -> None:
    """Raise OutsideSupport for a candidate that neither writes records nor names a format."""
    candidate = setting.candidate
    named = {*(candidate.support.cache_dtypes or ())} & {*LATENT_FORMATS}
    if "concat_and_cache_mla" not in candidate.operations and not named:
        raise OutsideSupport("records")


RECORD_PLANS = [
    SparsePlan((5, 0, 1, 20), kv_heads=1, seed=1),
    SparsePlan((33, 2), kv_heads=1, group=3, num_blocks=20, block_size=3,
               dtype=torch.float16, repeats=True, seed=2),
    SparsePlan((17, 40), kv_heads=1, group=1, block_size=16, dtype=torch.bfloat16,
               spare=30, seed=3),
]  # fmt: skip
LONG = SparsePlan(
    (1100, 3), kv_heads=1, group=1, num_blocks=80, block_size=16, dtype=torch.float16
)
"""The slots of the first token are more than a program takes at once."""


@law(
    ATTEND,
    cases=[(name, plan) for plan in (*RECORD_PLANS, LONG) for name in LATENT_FORMATS],
)
def a_query_attends_to_the_records_that_its_row_names(
    setting: Setting, case: tuple[str, SparsePlan]
) -> None:
    """A record is the key of its token, and its latent is the value."""
    name, plan = case
    expect_records(setting)
    call = build_records(name, plan, setting.device)
    read = {"query": call.query, "key_cache": call.key_cache, "slots": call.slots}
    with kept(**read):
        found = call.run(getattr(setting.candidate, ATTEND))
    expect_sparse(setting, call, found)


BAD_RECORDS: dict[str, Callable[[RecordCall], dict[str, Any]]] = {
    "values in other memory": lambda call: {"value_cache": call.key_cache.clone()},
    "queries of another width": lambda call: {"query": call.query[..., :-1]},
    "an output of another width": lambda call: {"out": call.query.clone()},
    "a scale": lambda call: {"k_scale": 0.5, "v_scale": 0.5},
    "a soft cap": lambda call: {"logits_soft_cap": 20.0},
    "batch invariance": lambda call: {"batch_invariant": True},
    "a slot past the cache": lambda call: {"slots": call.slots + 36},
}


@law(
    ATTEND,
    cases=[(what, name) for what in sorted(BAD_RECORDS) for name in LATENT_FORMATS],
    claim="rejects contents",
)
def impossible_calls_over_records_are_rejected(
    setting: Setting, case: tuple[str, str]
) -> None:
    what, name = case
    expect_records(setting)
    call = build_records(name, RECORD_PLANS[0], setting.device)
    changes = BAD_RECORDS[what](call)
    expect_rejection(
        what, lambda: call.run(getattr(setting.candidate, ATTEND), **changes)
    )
