"""Laws of latent caches that store records of bytes: writes and gathers.

Records are compared byte by byte with the rule of their format (`oracles/latent_formats.py`). All
bytes of slots that are not allocated are NaN, as codes and as scales.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any

import torch
from torch import Tensor

from ...contract.kinds import PAD_SLOT_ID
from ...contract.latent_formats import LATENT_FORMATS, LatentFormat
from ..candidates.setting import Setting
from ..checks.canaries import (
    copy_of,
    expect_memory,
    expect_rejection_without_writes,
    kept,
    packed,
)
from ..checks.expect import expect_same
from ..checks.record_caches import empty_records, put_record
from ..oracles.latent_formats import load_by_hand, store_by_hand
from .cache_gather import expect_same_numbers
from .law import law

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INFINITY = float("inf")


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
    with device:
        given |= UNFIT_WRITES[what](given)
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
