"""Laws of cache formats with a scale per token and head: writes, gathers, and attention over them.

Codes and scales are compared bit for bit with the rule of the format (`oracles/cache_formats.py`).
Attention is compared with the exact result over the numbers that the codes mean.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.cache_formats import CacheFormat
from ..base.support import Support
from ..candidates.calls.calling import expect_right, run_call
from ..candidates.setting import Setting
from ..cases.batches import NAN, BatchPlan
from ..cases.caches import CacheSizes
from ..cases.choice_calls import build_call
from ..cases.options import Call, paged_call
from ..checks.canaries import expect_own_memory, kept, packed
from ..checks.coded_caches import CODED, CodedCache, coded_call, make_coded
from ..checks.expect import expect_rejection, expect_same
from ..oracles.cache_formats import encode_by_hand
from .attention import Drawn, drawn_calls
from .attention_rejections import Change, base_call, expect_rejected
from .cache_gather import CacheRead, expect_same_numbers, reads
from .cache_write import CacheWrite, writes
from .law import law

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INFINITY = float("inf")
PLAIN = {"cache": "as the query", "scales": "none"}


def format_of(seed: int) -> CacheFormat:
    """Return the format of a case."""
    return CODED[seed % len(CODED)]


def fill_tokens(new: Tensor, seed: int) -> None:
    """Fill keys or values with rows of every kind: numbers, ties, zeros, tiny and huge ones, NaN.

    A row with the largest size 127 has the scale 1, so its numbers that end in .5 are ties.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(new.shape, generator=generator)
    kinds = torch.randint(0, 9, new.shape[:2], generator=generator).tolist()
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
            seed,
        ),
        seed,
    )
    for seed in range(len(CODED))
    for kv_heads, size, value_size in ((8, 128, 128), (3, 80, 40), (1, 512, 16))
]
"""Rows of sizes that models have, in each format."""


@law("reshape_and_cache", cases=coded_writes(), edges=WIDE_ROWS)
def a_cache_of_codes_holds_the_codes_and_scales_of_each_token(
    setting: Setting, case: CodedWrite
) -> None:
    """Scales that are given are only read. Nothing else changes, in whatever order pages are."""
    write, form = case.write, format_of(case.seed)
    dtype = DTYPES[case.seed % 3]
    cache = make_coded(form, write.sizes, setting.device, case.seed)
    right = cache.copied(form)
    tokens = write.tokens(setting.device, dtype)
    for number, new in enumerate(tokens):
        fill_tokens(new[: len(write.slots)], case.seed + number)
        write_by_hand(form, write, new.cpu(), right, number)
    slots = write.mapping(setting.device)
    with kept(key=tokens[0], value=tokens[1], slot_mapping=slots):
        found = setting.candidate.reshape_and_cache(
            *tokens, *cache.parts[:2], slots, cache.k_scale, cache.v_scale
        )
    expect_same("what a write returns", found, None)
    cache.expect_same(right)


def write_by_hand(
    form: CacheFormat, write: CacheWrite, new: Tensor, cache: CodedCache, number: int
) -> None:
    """Write the codes and scales of keys (number 0) or values (1) to a cache on the host."""
    codes, scale = cache.parts[number], cache.parts[2 + number]
    given = None if form.is_measured else scale
    made, measured = encode_by_hand(form, new, given)
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
    form, sizes = format_of(seed), read.sizes
    cache = make_coded(form, sizes, setting.device, seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = (None, *DTYPES)[seed % 4]
    rights = []
    for number, codes in enumerate(cache.parts[:2]):
        scale = cache.parts[2 + number]
        drawn = torch.randint(-127, 128, codes.shape, generator=generator)
        codes.copy_(drawn.to(torch.int8).view(codes.dtype))
        column = scale.cpu()[:, None]
        if form.is_measured:
            scales = torch.rand(scale.shape, generator=generator) + 0.01
            for length, row in zip(read.lens, read.rows, strict=True):
                for position in range(length):
                    at = row[position // sizes.block_size], position % sizes.block_size
                    scale[at] = scales[at].to(scale.device)
            column = read.gathered(scale)[..., None]
        rows = read.gathered(codes)
        # exact in float64: a code has 7 bits, a scale 24
        numbers = (rows.double() * column.double()).float()
        rights.append(rows if dtype is None else numbers.to(dtype))
    table, starts = read.table(setting.device), read.starts(setting.device)
    given: dict[str, Any] = {"key_cache": cache.key, "value_cache": cache.value}
    given |= {"block_table": table, "seq_start_loc": starts}
    if dtype is not None:
        given |= {"k_scale": cache.k_scale, "v_scale": cache.v_scale, "dtype": dtype}
    tensors = {
        name: tensor for name, tensor in given.items() if isinstance(tensor, Tensor)
    }
    with kept(**tensors):
        found = setting.candidate.gather_cache(**given, num_tokens=len(rights[0]))
    for name, half, right in zip(("key", "value"), found, rights, strict=True):
        expect_own_memory(f"gathered {name}", half, **tensors)
        same = expect_same if dtype is None else expect_same_numbers
        same(f"gathered {name}", packed(half), packed(right))


@law("paged_attention", cases=drawn_calls(fixed=PLAIN))
def attention_over_codes_is_right_under_any_options(
    setting: Setting, case: Drawn
) -> None:
    """Slots of no sequence have scales of NaN. About half of the requests hold a needle."""
    call = build_call(*case, setting.device)
    call = coded_call(call, format_of(case[1]), case[1])
    expect_right(setting, call, run_call(setting, call))


NEEDLES = [
    (BatchPlan((1, 1, 1), (33, 16, 1), seed=3), [(0, 32), (1, 0), (2, 0)]),
    (BatchPlan((1,), (300,), kv_heads=1, dtype=torch.float16), [(0, 299)]),
    (BatchPlan((1, 1), (257, 129), group=3, block_size=24), [(0, 0), (1, 64)]),
    (BatchPlan((5, 4), (70, 21), head_size=24, seed=1), [(0, 65), (1, 16)]),
    (BatchPlan((6, 1), (290, 65), kv_heads=1, group=8), [(0, 284), (1, 63)]),
    (BatchPlan((33, 40), (33, 101), layout="hnd", padding=2), [(0, 0), (1, 61)]),
    (BatchPlan((21, 1), (43, 43), dtype=torch.bfloat16), [(0, 22), (1, 42)]),
]
"""Decodes, short appends and prompts, with a key per request that outweighs all others."""


@law("paged_attention", cases=NEEDLES)
def attention_over_codes_finds_each_needle(
    setting: Setting, case: tuple[BatchPlan, list[tuple[int, int]]]
) -> None:
    """The needle is on the edge of a block, of a tile, or of what a query attends to."""
    plan, needles = case
    kept_needles = [(req, key) for req, key in needles if key < plan.kv_lens[req]]
    for form in CODED:
        call = coded_call(
            paged_call(plan, setting.device, kept_needles), form, plan.seed
        )
        expect_right(setting, call, run_call(setting, call))


@law("paged_attention", cases=[1e-4, 1e-2, 1.0, 300.0])
def values_of_any_size_keep_their_relative_accuracy(
    setting: Setting, size: float
) -> None:
    """In float16 the product of a weight and the scale of small values must not be subnormal."""
    plan = setting.fit(BatchPlan((1, 3), (40, 19), dtype=torch.float16, seed=5))
    call = paged_call(plan, setting.device)
    values = (call.arguments["value_cache"].float() * size).to(plan.dtype)
    call = replace(call, arguments=call.arguments | {"value_cache": values})
    for form in CODED:
        if form.is_measured:
            coded = coded_call(call, form, plan.seed)
            expect_right(setting, coded, run_call(setting, coded))


@law("cascade_attention", cases=[0, 1, 2])
def a_shared_prefix_of_codes_is_read_once(setting: Setting, seed: int) -> None:
    """The result is that of attention over the whole sequences."""
    plan = BatchPlan((1, 2, 1), (40, 37, 33), table="scattered", seed=seed)
    call = paged_call(setting.fit(plan), setting.device)
    size = call.arguments["key_cache"].shape[1]
    prefix = 32 // size * size
    rows, table = [list(row) for row in call.rows], call.arguments["block_table"]
    for req, row in enumerate(rows):
        row[: prefix // size] = rows[0][: prefix // size]
        table[req, : prefix // size] = table[0, : prefix // size]
    for form in CODED:
        coded = coded_call(replace(call, rows=rows), form, seed)
        shared = replace(
            coded,
            operation="cascade_attention",
            arguments=coded.arguments | {"common_prefix_len": prefix},
        )
        expect_right(setting, coded, run_call(setting, shared))


def scales_like(call: Call, **changes: Any) -> Tensor:
    """Return the scales of the keys with another shape, dtype or device."""
    shape = changes.get("shape", call.arguments["k_scale"].shape)
    return torch.ones(shape, dtype=changes.get("dtype", torch.float32))


WRONG_SCALES: dict[str, Change] = {
    "codes without scales": lambda call: {"k_scale": None, "v_scale": None},
    "a number": lambda call: {"k_scale": 0.5},
    "scales of fewer blocks": lambda call: {
        "k_scale": scales_like(call, shape=(1, *call.arguments["k_scale"].shape[1:]))
    },
    "scales of other slots": lambda call: {
        "v_scale": call.arguments["v_scale"].transpose(1, 2).contiguous()
    },
    "scales in half precision": lambda call: {
        "v_scale": scales_like(call, dtype=torch.float16)
    },
}


@law("paged_attention", cases=list(WRONG_SCALES), claim="rejects shapes")
def wrong_scales_of_codes_are_rejected(setting: Setting, what: str) -> None:
    for form in CODED:
        if form.is_measured:
            call = coded_call(base_call(setting), form, 0)
            expect_rejected(setting, what, call, WRONG_SCALES[what])


SIZES = CacheSizes(3, 4, 2, 8, 8, torch.int8)
WRONG_WRITES: dict[str, Callable[[CodedCache], dict[str, Any]]] = {
    "codes without scales": lambda cache: {"k_scale": None, "v_scale": None},
    "one number for all keys": lambda cache: {"k_scale": 0.5},
    "scales of one head": lambda cache: {"k_scale": cache.k_scale[..., :1]},
    "codes for numbers": lambda cache: {
        "key": torch.ones(2, 2, 8, dtype=torch.int8, device=cache.key.device)
    },
}


@law("reshape_and_cache", cases=list(WRONG_WRITES), claim="rejects shapes")
def wrong_writes_of_codes_are_rejected_before_any_write(
    setting: Setting, what: str
) -> None:
    device = setting.device
    for form in CODED:
        if not form.is_measured:
            continue
        cache = make_coded(form, SIZES, device, 0)
        arguments: dict[str, Any] = {
            "key": torch.ones(2, 2, 8, device=device),
            "value": torch.ones(2, 2, 8, device=device),
            "key_cache": cache.key,
            "value_cache": cache.value,
            "slot_mapping": torch.tensor([5, 0], device=device),
            "k_scale": cache.k_scale,
            "v_scale": cache.v_scale,
        } | WRONG_WRITES[what](cache)
        right = cache.copied(form)
        write = partial(setting.candidate.reshape_and_cache, **arguments)
        expect_rejection(what, write)
        cache.expect_same(right)
