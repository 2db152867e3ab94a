"""Laws of attention over latent caches that store records of bytes.

The expected result is exact attention over the numbers that the stored bytes mean. All bytes of
slots that are not allocated are NaN, as codes and as scales.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...contract.latent_formats import LATENT_FORMATS, LatentFormat
from ..base.support import OutsideSupport
from ..candidates.setting import Setting
from ..cases.batches import put_on
from ..cases.latent_batches import LatentBatch, LatentPlan, build_latents
from ..checks.canaries import kept
from ..checks.expect import expect_rejection
from ..checks.record_caches import empty_records, on_device, put_record
from ..oracles.latent_formats import load_by_hand, store_by_hand
from .latents import WAYS, expect_latents, run_latents
from .law import law


def record_batch(
    form: LatentFormat, plan: LatentPlan, device: torch.device
) -> tuple[LatentBatch, Tensor]:
    """Return a batch whose latents are the numbers that records mean, and the records' cache.

    Latents of every second position are 1,000 times smaller, so neighbours have other scales.
    """
    plan = replace(plan, rank=form.kv_lora_rank, rope=form.qk_rope_head_dim)
    batch = build_latents(plan, torch.device("cpu"))
    size, shape = plan.block_size, batch.kv_cache.shape
    records = empty_records(form, shape[0], size, torch.device("cpu"))
    numbers = torch.full(shape, float("nan"), dtype=torch.float64)
    for row, length in zip(batch.rows, plan.key_lens, strict=True):
        at = [(row[position // size], position % size) for position in range(length)]
        if not at:
            continue
        latents = torch.stack([batch.kv_cache[place] for place in at]).float()
        latents[1::2, : form.kv_lora_rank] *= 1e-3
        new = torch.split(latents, [form.kv_lora_rank, form.qk_rope_head_dim], 1)
        stored = store_by_hand(form.name, *new)
        meant = load_by_hand(form.name, stored)
        for position, (block, offset) in enumerate(at):
            put_record(form, records, block * size + offset, stored[position])
            numbers[block, offset] = meant[position]
    moved: dict[str, Any] = {
        name: put_on(value, device)
        for name, value in vars(replace(batch, kv_cache=numbers)).items()
        if isinstance(value, Tensor)
    }
    return replace(batch, **moved), on_device(records, device)


def expect_records(setting: Setting) -> None:
    """Raise OutsideSupport for a candidate that neither gathers records nor names a format."""
    candidate = setting.candidate
    named = {*(candidate.support.cache_dtypes or ())} & {*LATENT_FORMATS}
    if "gather_latent_cache" not in candidate.operations and not named:
        raise OutsideSupport("records")


RECORD_PLANS = [
    LatentPlan((1, 3), (33, 20), heads=2, needle="block edge", seed=1),
    LatentPlan((1, 1, 0), (70, 16, 4), heads=3, needle="last", is_rope=True, padding=2,
               dtype=torch.bfloat16, seed=2),
    LatentPlan((2, 5), (40, 5), heads=1, block_size=3, dtype=torch.float16, seed=3),
]  # fmt: skip


@law(
    WAYS[0],
    cases=[
        (way, form, plan)
        for plan in RECORD_PLANS
        for form in LATENT_FORMATS
        for way in WAYS
    ],
)
def attention_over_records_is_attention_over_what_they_mean(
    setting: Setting, case: tuple[str, str, LatentPlan]
) -> None:
    way, name, plan = case
    expect_records(setting)
    batch, records = record_batch(LATENT_FORMATS[name], plan, setting.device)
    changes: dict[str, Any] = {"kv_cache": records}
    if way == WAYS[1]:
        changes["max_context_chunk"] = 13
    with kept(kv_cache=records):
        found = run_latents(setting, batch, way, **changes)
    expect_latents(setting, batch, way, found, **changes)


LONG = LatentPlan((1, 2), (1100, 18), heads=1, needle="first", dtype=torch.float16)


@law(
    WAYS[0],
    cases=[(form, window) for form in LATENT_FORMATS for window in (None, 7)],
)
def a_decode_of_many_records_attends_to_its_window(
    setting: Setting, case: tuple[str, int | None]
) -> None:
    """The keys of the long request are more than a program takes at once."""
    name, window = case
    expect_records(setting)
    plan = setting.fit(replace(LONG, sliding_window=window))
    batch, records = record_batch(LATENT_FORMATS[name], plan, setting.device)
    found = run_latents(setting, batch, WAYS[0], kv_cache=records)
    expect_latents(setting, batch, WAYS[0], found, kv_cache=records)


@law(*WAYS, "gather_latent_cache", cases=WAYS, claim="rejects shapes")
def attention_with_widths_of_other_records_is_rejected(
    setting: Setting, way: str
) -> None:
    """The widths are those of fp8_ds_mla_v4, the cache has records of fp8_ds_mla."""
    plan = LatentPlan((1,), (20,), heads=1)
    batch, _ = record_batch(LATENT_FORMATS["fp8_ds_mla_v4"], plan, setting.device)
    other = empty_records(LATENT_FORMATS["fp8_ds_mla"], 4, 16, setting.device)
    call = partial(run_latents, setting, batch, way, kv_cache=other)
    expect_rejection("records of other widths", call)
