"""Laws of latent caches that store records of bytes: writes, gathers, and attention over them.

Records are compared byte by byte with the rule of their format (`oracles/latent_formats.py`), and
attention with the exact result over the numbers that the stored bytes mean. All bytes of slots that
are not allocated are 0xFF: NaN, as codes and as scales.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any

import torch
from torch import Tensor

from ...contract.kinds import PAD_SLOT_ID
from ...contract.latent_formats import LATENT_FORMATS, LatentFormat
from ..candidates.setting import Setting
from ..cases.latent_batches import LatentBatch, LatentPlan, build_latents
from ..checks.canaries import (
    copy_of,
    expect_memory,
    expect_rejection_without_writes,
    kept,
    packed,
)
from ..checks.expect import expect_same
from ..oracles.latent_formats import load_by_hand, store_by_hand
from .cache_gather import expect_same_numbers
from .latents import WAYS, arguments_of, expect_latents, run_latents
from .law import law

POISON = 0xFF
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INFINITY = float("inf")


def empty_records(
    form: LatentFormat, num_blocks: int, block_size: int, device: torch.device
) -> Tensor:
    """Return a cache full of poison; its blocks have bytes after their records."""
    size = form.block_bytes(block_size)
    pages = torch.full((num_blocks + 1, size + 8), POISON, dtype=torch.uint8)
    # the first page and the first bytes of each page belong to something else
    return form.view_cache(pages.to(device)[1:, 8:], block_size)


def put_record(form: LatentFormat, kv_cache: Tensor, slot: int, record: Tensor) -> None:
    """Write the record of one slot by hand, through the bytes of its block."""
    num_blocks, size, _ = kv_cache.shape
    block, offset = divmod(slot, size)
    total = size * form.record_bytes
    strides = (kv_cache.stride(0), 1)
    blocks = kv_cache.as_strided((num_blocks, total), strides)
    if form.name == "fp8_ds_mla_v4":
        blocks[block, offset * 576 : offset * 576 + 576] = record[:576]
        scales = size * 576 + offset * 8
        blocks[block, scales : scales + 8] = record[576:]
    else:
        first = offset * len(record)
        blocks[block, first : first + len(record)] = record


def draw_latents(form: LatentFormat, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return latents and rope keys of every kind, in float32.

    Rows are numbers, codes and ties of codes, zeros of both signs, of one sign, tiny and huge ones,
    and have NaN or infinite elements. Neighbours differ by a factor of 1,000 and more.
    """
    generator = torch.Generator().manual_seed(seed)
    kv_c = torch.randn(tokens, form.kv_lora_rank, generator=generator)
    k_pe = torch.randn(tokens, form.qk_rope_head_dim, generator=generator)
    kinds = torch.randint(0, 10, (tokens,), generator=generator).tolist()
    for token, kind in enumerate(kinds):
        row, rope = kv_c[token], k_pe[token]
        if kind == 0:
            # the largest size is that of the largest code, so these are codes and ties
            row.copy_((row * 8).round() / 4)
            row[:: form.tile] = 6.0 if form.name == "nvfp4_ds_mla" else -448.0
        elif kind == 1:
            row.zero_()
            rope.zero_()
        elif kind == 2:
            row.copy_(-row.abs() * 0.0)
        elif kind == 3:
            row.copy_(row.abs() * 1000.0)
            rope *= 1000.0
        elif kind == 4:
            row *= 1e-7
            rope *= 1e-40
        elif kind == 5:
            row *= 1e30
        elif kind == 6:
            row[7], row[-1] = -INFINITY, INFINITY
            rope[3] = -INFINITY
        elif kind == 7:
            row[5], rope[1] = float("nan"), float("nan")
    return kv_c, k_pe


@dataclass(frozen=True)
class RecordWrite:
    """A write of records: format, dtype of the new tokens, sizes, and a seed."""

    form: str
    dtype: torch.dtype
    blocks: int
    block_size: int
    tokens: int
    seed: int


RECORD_WRITES = [
    RecordWrite(form, DTYPES[seed % 3], blocks, size, tokens, seed)
    for form in LATENT_FORMATS
    for seed, (blocks, size, tokens) in enumerate(
        [(3, 16, 24), (2, 64, 40), (5, 1, 4), (1, 8, 0), (4, 24, 50), (2, 16, 31)]
    )
]


@law("concat_and_cache_mla", "gather_latent_cache", cases=RECORD_WRITES)
def a_record_holds_the_codes_and_scales_of_its_token(
    setting: Setting, case: RecordWrite
) -> None:
    """Tokens without a slot are not stored, and no other byte changes."""
    form, pick = LATENT_FORMATS[case.form], Random(case.seed)
    cache = empty_records(form, case.blocks, case.block_size, setting.device)
    kv_c, k_pe = draw_latents(form, case.tokens + 2, case.seed)
    kv_c, k_pe = kv_c.to(case.dtype), k_pe.to(case.dtype)
    slots = pick.sample(range(case.blocks * case.block_size), case.tokens)
    slots = [PAD_SLOT_ID if pick.random() < 0.2 else slot for slot in slots]
    right = copy_of(cache)
    records = store_by_hand(form.name, kv_c, k_pe)
    for token, slot in enumerate(slots):
        if slot >= 0:
            put_record(form, right, slot, records[token])
    fused = torch.cat([kv_c, k_pe], 1).to(setting.device)
    new = torch.split(fused, [form.kv_lora_rank, form.qk_rope_head_dim], 1)
    mapping = torch.tensor(slots, dtype=torch.int64, device=setting.device)
    with kept(kv_c=new[0], k_pe=new[1], slot_mapping=mapping):
        found = setting.candidate.concat_and_cache_mla(*new, cache, mapping)
    expect_same("what it returns", found, None)
    expect_memory("kv_cache", cache, right)


def fill_sequences(
    form: LatentFormat, cache: Tensor, rows: list[list[int]], lens: list[int], seed: int
) -> list[Tensor]:
    """Store records of any bytes for sequences, and return them: [tokens, bytes] each."""
    generator = torch.Generator().manual_seed(seed)
    size, stored = cache.shape[1], []
    for row, length in zip(rows, lens, strict=True):
        shape = (length, form.record_bytes)
        records = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
        if form.name == "fp8_ds_mla":
            scales = torch.rand(length, 4, generator=generator) * 3 + 1e-4
            records[:, 512:528] = scales.view(torch.uint8)
        for position, record in enumerate(records):
            slot = row[position // size] * size + position % size
            put_record(form, cache, slot, record.to(cache.device))
        stored.append(records)
    return stored


RECORD_READS = [
    (form, dtype, seed)
    for form in LATENT_FORMATS
    for seed, dtype in enumerate((torch.float64, *DTYPES))
]


@law("gather_latent_cache", cases=RECORD_READS)
def gathered_records_are_the_numbers_that_their_bytes_mean(
    setting: Setting, case: tuple[str, torch.dtype, int]
) -> None:
    """For any bytes. Rows past the last sequence are 0. In float64 the products are exact."""
    name, dtype, seed = case
    form, device = LATENT_FORMATS[name], setting.device
    size = (16, 3, 24, 1)[seed]
    lens = [size + size // 2, 0, 2 * size, 1]
    rows = [[4, 1], [], [2, 5], [0]]
    cache = empty_records(form, 7, size, device)
    records = torch.cat(fill_sequences(form, cache, rows, lens, seed))
    numbers = load_by_hand(name, records)
    if dtype != torch.float64:
        numbers = numbers.float().to(dtype)
    right = torch.cat([numbers, numbers.new_zeros(2, form.width)])
    table = torch.full((4, 3), 10**6, dtype=torch.int32)
    for req, row in enumerate(rows):
        table[req, : len(row)] = torch.tensor(row, dtype=torch.int32)
    starts = torch.tensor([0, *accumulate(lens)], dtype=torch.int32)
    given = (table.to(device), starts.to(device))
    wide = torch.full((len(right), 2 * form.width), 7.0, dtype=dtype, device=device)
    for found in (wide[:, : form.width], wide[:, ::2]):
        wide.fill_(7.0)
        with kept(kv_cache=cache, block_table=given[0], seq_start_loc=given[1]):
            setting.candidate.gather_latent_cache(cache, found, *given)
        expect_same_numbers("gathered rows", packed(found), packed(right))
        found.fill_(7.0)
        expect_same("around the rows", wide.cpu(), torch.full_like(wide.cpu(), 7.0))


PLAIN_READS: list[tuple[torch.dtype, torch.dtype, float | None]] = [
    (torch.float32, torch.float32, None),
    (torch.bfloat16, torch.bfloat16, None),
    (torch.float8_e4m3fn, torch.float16, 0.3),
    (torch.float8_e5m2, torch.float32, 8.0),
]


@law("gather_latent_cache", cases=PLAIN_READS)
def gathered_latents_are_elements_times_their_scale(
    setting: Setting, case: tuple[torch.dtype, torch.dtype, float | None]
) -> None:
    cache_dtype, dtype, scale = case
    device = setting.device
    generator = torch.Generator().manual_seed(3)
    cache = torch.randn(4, 3, 7, generator=generator).to(cache_dtype)
    right = torch.cat([cache[2], cache[0, :2], cache[3, :1], cache[0, :0]])
    numbers = right.to(dtype)
    if scale is not None:
        numbers = (right.float() * scale).to(dtype)
    numbers = torch.cat([numbers, numbers.new_zeros(1, 7)])
    table = torch.tensor([[2, 0], [3, 9]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 5, 6], dtype=torch.int32, device=device)
    found = torch.full((7, 7), 7.0, dtype=dtype, device=device)
    setting.candidate.gather_latent_cache(cache.to(device), found, table, starts, scale)
    expect_same_numbers("gathered rows", packed(found), packed(numbers))


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
        name: value.to(device)
        for name, value in vars(replace(batch, kv_cache=numbers)).items()
        if isinstance(value, Tensor)
    }
    return replace(batch, **moved), on_device(records, device)


def on_device(cache: Tensor, device: torch.device) -> Tensor:
    """Return the same view of the same memory on a device."""
    memory = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    place = cache.shape, cache.stride(), cache.storage_offset()
    return memory.to(device).as_strided(*place)


RECORD_PLANS = [
    LatentPlan((1, 3), (33, 20), heads=2, needle="block edge", seed=1),
    LatentPlan((1, 1, 0), (70, 16, 4), heads=3, needle="last", is_rope=True, padding=2,
               dtype=torch.bfloat16, seed=2),
    LatentPlan((2, 5), (40, 5), heads=1, block_size=3, dtype=torch.float16, seed=3),
]  # fmt: skip


@law(
    *WAYS,
    "gather_latent_cache",
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
    "gather_latent_cache",
    cases=[(form, window) for form in LATENT_FORMATS for window in (None, 7)],
)
def a_decode_of_many_records_attends_to_its_window(
    setting: Setting, case: tuple[str, int | None]
) -> None:
    """The keys of the long request are more than a program takes at once."""
    name, window = case
    plan = replace(LONG, sliding_window=window)
    batch, records = record_batch(LATENT_FORMATS[name], plan, setting.device)
    found = run_latents(setting, batch, WAYS[0], kv_cache=records)
    expect_latents(setting, batch, WAYS[0], found, kv_cache=records)


Unfit = Callable[[dict[str, Any]], dict[str, Any]]
UNFIT_WRITES: dict[str, Unfit] = {
    "a latent of another width": lambda given: {"kv_c": given["kv_c"][:, :448]},
    "a rope key of another width": lambda given: {"k_pe": given["k_pe"][:, :32]},
    "bytes of no format": lambda given: {"kv_cache": given["kv_cache"][..., :600]},
    "a scale": lambda given: {"scale": 0.5},
    "records with gaps between bytes": lambda given: {
        "kv_cache": torch.zeros(3, 4, 1312, dtype=torch.uint8)[..., ::2]
    },
    "records at odd addresses": lambda given: {
        "kv_cache": torch.zeros(3, 4, 657, dtype=torch.uint8)[..., 1:]
    },
    "FP8 elements": lambda given: {
        "kv_cache": given["kv_cache"].view(torch.float8_e4m3fn),
        "scale": 1.0,
    },
    "records of another format": lambda given: {
        "kv_cache": torch.zeros(3, 4, 584, dtype=torch.uint8)
    },
}


@law(
    "concat_and_cache_mla",
    "gather_latent_cache",
    cases=list(UNFIT_WRITES),
    claim="rejects shapes",
)
def records_that_do_not_fit_are_rejected_before_any_write(
    setting: Setting, what: str
) -> None:
    device = setting.device
    given: dict[str, Any] = {
        "kv_c": torch.ones(3, 512, device=device),
        "k_pe": torch.ones(3, 64, device=device),
        "kv_cache": torch.full((3, 4, 656), 7, dtype=torch.uint8, device=device),
        "slot_mapping": torch.tensor([5, 0, 11], device=device),
    }
    given |= UNFIT_WRITES[what](given)
    given["kv_cache"] = given["kv_cache"].to(device)
    call = partial(setting.candidate.concat_and_cache_mla, **given)
    expect_rejection_without_writes(what, call, kv_cache=given["kv_cache"])


UNFIT_READS: dict[str, Unfit] = {
    "rows of another width": lambda given: {"latents": given["latents"][:, :575]},
    "rows of bytes": lambda given: {"latents": given["latents"].to(torch.uint8)},
    "a scale": lambda given: {"scale": 0.5},
    "bytes of no format": lambda given: {"kv_cache": given["kv_cache"][..., :600]},
    "a block outside of the cache": lambda given: {
        "block_table": given["block_table"] + 2
    },
    "more tokens than rows": lambda given: {"latents": given["latents"][:4]},
}


@law("gather_latent_cache", cases=list(UNFIT_READS), claim="rejects contents")
def gathers_that_do_not_fit_are_rejected_before_any_write(
    setting: Setting, what: str
) -> None:
    device = setting.device
    given: dict[str, Any] = {
        "kv_cache": torch.zeros(3, 4, 656, dtype=torch.uint8, device=device),
        "latents": torch.full((6, 576), 7.0, device=device),
        "block_table": torch.tensor([[1, 0]], dtype=torch.int32, device=device),
        "seq_start_loc": torch.tensor([0, 5], dtype=torch.int32, device=device),
    }
    given |= UNFIT_READS[what](given)
    call = partial(setting.candidate.gather_latent_cache, **given)
    expect_rejection_without_writes(what, call, latents=given["latents"])


@law(*WAYS, "gather_latent_cache", cases=WAYS, claim="rejects shapes")
def attention_with_widths_of_other_records_is_rejected(
    setting: Setting, way: str
) -> None:
    """The widths are those of fp8_ds_mla_v4, the cache has records of fp8_ds_mla."""
    plan = LatentPlan((1,), (20,), heads=1)
    batch, _ = record_batch(LATENT_FORMATS["fp8_ds_mla_v4"], plan, setting.device)
    other = empty_records(LATENT_FORMATS["fp8_ds_mla"], 4, 16, setting.device)
    out = torch.full((1, 1, 16), 7.0, device=setting.device)
    call = partial(run_latents, setting, batch, way, kv_cache=other)
    assert "kv_cache" in arguments_of(batch, way)
    expect_rejection_without_writes("other records", call, out=out)
