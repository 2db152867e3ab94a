"""Laws of cache formats whose scales are measured: writes and gathers.

Codes and scales are compared bit for bit with the rule of the format (`oracles/cache_formats.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.cache_formats import FORMATS, CacheFormat, head_size_of
from ..base.support import Support
from ..candidates.setting import Setting
from ..cases.batches import NAN
from ..cases.caches import CacheSizes
from ..checks.canaries import expect_own_memory, kept, packed
from ..checks.coded_caches import (
    CODED,
    CodedCache,
    fit_sizes,
    format_of,
    make_coded,
)
from ..checks.expect import expect_rejection, expect_same
from ..oracles.cache_formats import decode_by_hand, encode_by_hand
from .cache_gather import CacheRead, expect_same_numbers, reads
from .cache_write import CacheWrite, writes
from .law import law

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INFINITY = float("inf")


def fill_tokens(new: Tensor, seed: int) -> None:
    """Fill keys or values with rows of every kind: numbers, ties, zeros, tiny and huge ones, NaN.

    Some have one sign, or a channel that outweighs the others. A row with the largest size 127 has
    the scale 1, so its numbers that end in .5 are ties. In blocks with the largest size 6 quarters
    are. Multiples of 3 have the same codes with the largest code 6 and with 4.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(new.shape, generator=generator)
    kinds = torch.randint(0, 11, new.shape[:2], generator=generator).tolist()
    for token, heads in enumerate(kinds):
        for head, kind in enumerate(heads):
            row = numbers[token, head]
            if kind == 0:
                row.copy_((row * 40).round().clamp(-126, 126) + 0.5)
                row[0] = -127.0
            elif kind == 1:
                row.zero_()
            elif kind == 2:
                row *= 1e-7
            elif kind == 3:
                row *= 9000.0
            elif kind == 4:
                row[row.shape[0] // 2] = NAN
            elif kind == 5:
                row[-1] = INFINITY if token % 2 else -INFINITY
            elif kind == 6:
                row.abs_().add_(5)
            elif kind == 7:
                row[0] *= 300
            elif kind == 8:
                row.copy_((row * 12).round().clamp(-24, 24) / 4)
                row[::16] = 6.0
            elif kind == 9:
                row *= 0.003
            elif kind == 10:
                row.copy_(row.round().clamp(-2, 2) * 3)
                row[::16] = -6.0
    new.copy_(numbers.to(new.dtype))


@dataclass(frozen=True)
class CodedWrite:
    """A write to a cache of codes, and the seed of the cache's memory."""

    write: CacheWrite
    seed: int

    def within(self, support: Support) -> "CodedWrite":
        """Return the write with supported sizes and forms of tokens."""
        sizes = replace(self.write.sizes, dtype=torch.float32)
        fitted = replace(self.write, sizes=sizes).within(support)
        return replace(self, write=fitted)


@st.composite
def coded_writes(draw: st.DrawFn) -> CodedWrite:
    """Return a write to scattered slots, negative ones among them."""
    return CodedWrite(draw(writes((torch.float32,))), draw(st.integers(0, 2**16)))


WIDE_ROWS = [
    CodedWrite(
        CacheWrite(
            (90, -1, 3, 47, 16, 95, 0),
            0,
            CacheSizes(6, 16, kv_heads, size, value_size, torch.float32),
            ("packed", "packed"),
            1,
            seed + number * len(CODED),
        ),
        seed + number * len(CODED),
    )
    for seed in range(len(CODED))
    for number, (kv_heads, size, value_size) in enumerate(
        ((8, 128, 128), (3, 80, 40), (1, 512, 16), (40, 128, 64), (2, 128, 128))
    )
]  # fmt: skip
"""Rows of sizes that models have, in each format, and more heads than a kernel's tile has."""
NO_ROWS = [
    CodedWrite(
        CacheWrite(
            (), 0, CacheSizes(1, 4, 2, 16, 16, torch.float32), ("packed", "packed"),
            1, seed,
        ),
        seed,
    )
    for seed in range(len(CODED))
]  # fmt: skip
"""Writes of no token."""


@law("reshape_and_cache", cases=coded_writes(), edges=WIDE_ROWS + NO_ROWS)
def a_cache_of_codes_holds_the_codes_and_scales_of_each_token(
    setting: Setting, case: CodedWrite
) -> None:
    """Scales that are given are only read. Nothing else changes, in whatever order pages are."""
    form, dtype = format_of(case.seed), DTYPES[case.seed // len(CODED) % 3]
    write = replace(case.write, sizes=fit_sizes(form, case.write.sizes))
    cache = make_coded(form, write.sizes, setting.device, case.seed)
    right = cache.copied(form)
    tokens = write.tokens(setting.device, dtype)
    for number, new in enumerate(tokens):
        fill_tokens(new[: len(write.slots)], case.seed + number)
        write_by_hand(form, write, new.cpu(), right, number)
    slots = write.mapping(setting.device)
    with kept(key=tokens[0], value=tokens[1], slot_mapping=slots):
        found = setting.candidate.reshape_and_cache(
            *tokens, *cache.parts[:2], slots, *cache.parts[2:], **name_of(form),
            **cache.options,
        )  # fmt: skip
    expect_same("what a write returns", found, None)
    cache.expect_same(right)


def name_of(form: CacheFormat) -> dict[str, str]:
    """Return the argument that names a format, for one that dtype and scales do not tell."""
    alike = (other for other in FORMATS.values() if other.dtype == form.dtype)
    first = next(other for other in alike if other.scales == form.scales)
    return {} if form is first else {"kv_cache_dtype": form.name}


def write_by_hand(
    form: CacheFormat, write: CacheWrite, new: Tensor, cache: CodedCache, number: int
) -> None:
    """Write the codes and scales of keys (number 0) or values (1) to a cache on the host."""
    codes, scale = cache.parts[number], cache.parts[2 + number]
    made, measured = encode_by_hand(form, new, cache.given(form, number))
    for token, slot in enumerate(write.slots):
        if slot >= 0:
            at = divmod(slot, write.sizes.block_size)
            codes[at] = made[token]
            if measured is not None:
                scale[at] = measured[token]


@law("gather_cache", cases=st.tuples(reads((torch.float32,)), st.integers(0, 2**16)))
def gathered_codes_of_a_format_are_codes_times_scales(
    setting: Setting, case: tuple[CacheRead, int]
) -> None:
    """Without a dtype the codes come as they are. Slots of no sequence have scales of NaN.

    A code of NaN is decoded as NaN, of either sign: a chip's own conversion leaves it out.
    """
    read, seed = case
    form = format_of(seed)
    sizes = fit_sizes(form, read.sizes)
    cache = make_coded(form, sizes, setting.device, seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = (None, *DTYPES)[seed % 4]
    rights = []
    for number, codes in enumerate(cache.parts[:2]):
        scale = cache.parts[2 + number]
        drawn = torch.randint(-127, 128, codes.shape, generator=generator)
        codes.copy_(drawn.to(torch.int8).view(codes.dtype))
        factors = scale.cpu()
        if form.is_measured:
            scales = torch.rand(scale.shape, generator=generator) + 0.01
            scales = scales.to(scale.dtype)
            for length, row in zip(read.lens, read.rows, strict=True):
                for position in range(length):
                    at = row[position // sizes.block_size], position % sizes.block_size
                    scale[at] = scales[at].to(scale.device)
            factors = read.gathered(scale)
        rows = read.gathered(codes)
        # exact in float64: a code has 7 bits, a rotated one 13, a scale 24
        global_scale = cache.global_scales[number] if cache.global_scales else None
        numbers = decode_by_hand(form, rows, factors, global_scale).float()
        numbers[sum(read.lens) :] = 0
        rights.append(rows if dtype is None else numbers.to(dtype))
    table, starts = read.table(setting.device), read.starts(setting.device)
    given: dict[str, Any] = {"key_cache": cache.key, "value_cache": cache.value}
    given |= {"block_table": table, "seq_start_loc": starts}
    if dtype is not None:
        given |= {"k_scale": cache.k_scale, "v_scale": cache.v_scale, "dtype": dtype}
        given |= cache.options
    tensors = {
        name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor)
    }
    with kept(**tensors):
        found = setting.candidate.gather_cache(**given, num_tokens=len(rights[0]))
    for name, half, right in zip(("key", "value"), found, rights, strict=True):
        expect_own_memory(f"gathered {name}", half, **tensors)
        same = expect_same if dtype is None else expect_same_numbers
        same(f"gathered {name}", packed(half), packed(right))


SIZES = CacheSizes(3, 4, 2, 8, 8, torch.int8)


def overlapping_scales(cache: CodedCache) -> dict[str, Any]:
    """Return scales of keys and of values that begin one scale apart in one tensor."""
    scale = cache.k_scale
    memory = scale.new_empty(scale.numel() + 1)
    return {
        "k_scale": memory[:-1].view(scale.shape),
        "v_scale": memory[1:].view(scale.shape),
    }


def scales_in_codes(cache: CodedCache) -> dict[str, Any]:
    """Return codes of keys, and scales of keys that begin in the last block of them."""
    codes, scale = cache.key.contiguous(), cache.k_scale
    start = codes.numel() - 16
    memory = torch.zeros(start + scale.nbytes, dtype=torch.uint8, device=codes.device)
    key = memory[: codes.numel()].view(codes.dtype).view(codes.shape)
    found = memory[start : start + scale.nbytes].view(scale.dtype)
    return {"key_cache": key, "k_scale": found.view(scale.shape)}


WRONG_WRITES: dict[str, Callable[[CodedCache], dict[str, Any]]] = {
    "codes without scales": lambda cache: {"k_scale": None, "v_scale": None},
    "one number for all keys": lambda cache: {"k_scale": 0.5},
    "scales of one head": lambda cache: {"k_scale": cache.k_scale[:, :, :1]},
    "no scale of the values": lambda cache: {"v_scale": None},
    "no global scale, or one without block scales": lambda cache: {
        "k_global_scale": None if cache.global_scales else 1.0
    },
    "a global scale of 0": lambda cache: {"k_global_scale": 0.0},
    "an infinite global scale": lambda cache: {"v_global_scale": INFINITY},
    "codes for numbers": lambda cache: {
        "key": torch.ones(
            2, 2, head_size_of(cache.key), dtype=torch.int8, device=cache.key.device
        )
    },
    "one tensor for codes of keys and values": lambda cache: {"value_cache": cache.key},
    "one tensor for scales of keys and values": lambda cache: {
        "v_scale": cache.k_scale
    },
    "scales that overlap by all but the first": overlapping_scales,
    "scales in one place": lambda cache: {
        "k_scale": cache.k_scale[:1].expand(cache.k_scale.shape)
    },
    "scales of keys in the codes of keys": scales_in_codes,
    "codes in one place": lambda cache: {
        "key_cache": cache.key[:1].expand(cache.key.shape)
    },
    "the name of another format": lambda cache: {"kv_cache_dtype": "fp8_e4m3"},
    "a name that no format has": lambda cache: {"kv_cache_dtype": "int4"},
}


@law("reshape_and_cache", cases=list(WRONG_WRITES), claim="rejects shapes")
def wrong_writes_of_codes_are_rejected_before_any_write(
    setting: Setting, what: str
) -> None:
    device = setting.device
    for form in CODED:
        if not form.is_measured:
            continue
        sizes = fit_sizes(form, SIZES)
        cache = make_coded(form, sizes, device, 0)
        arguments: dict[str, Any] = {
            "key": torch.ones(2, 2, sizes.head_size, device=device),
            "value": torch.ones(2, 2, sizes.head_size, device=device),
            "key_cache": cache.key,
            "value_cache": cache.value,
            "slot_mapping": torch.tensor([5, 0], device=device),
            "k_scale": cache.k_scale,
            "v_scale": cache.v_scale,
        }
        arguments |= cache.options | WRONG_WRITES[what](cache)
        right = cache.copied(form)
        write = partial(setting.candidate.reshape_and_cache, **arguments)
        expect_rejection(what, write)
        cache.expect_same(right)
