"""Laws of cache operations: write, gather, block copy and block swap.

These operations move bytes, so every result is exactly right or wrong, for an FP8 cache too. After
a write whole allocations are compared: slots that were not named, and the memory around the view.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.kinds import FP8_DTYPES
from ..generators.batches import GARBAGE, LAYOUTS, NAN, empty_cache, heads_of
from ..harness.canaries import (
    copy_of,
    expect_all_refused,
    expect_memory,
    expect_own_memory,
    kept,
    packed,
)
from ..harness.expect import expect_same
from ..harness.law import Setting, law

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PADDING = (-1, -1, -7, -(2**31), -(2**40))
BLOCK_SIZES = (1, 3, 16, 16, 24)
HEAD_SIZES = (1, 8, 8, 24, 80)


@dataclass(frozen=True)
class CacheSizes:
    """The sizes, dtype and memory layouts of a cache.

    Args:
        num_blocks, block_size, kv_heads, head_size, value_head_size: sizes of the cache.
        dtype: element type of the cache.
        layout, value_layout: memory layouts of the key and the value cache. If they are equal and
            the head sizes are too, both caches are halves of one allocation.
    """

    num_blocks: int
    block_size: int
    kv_heads: int
    head_size: int
    value_head_size: int
    dtype: torch.dtype
    layout: str = "separate"
    value_layout: str = "separate"

    def caches(self, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return a key cache and a value cache, filled with random bytes."""
        sizes = (self.num_blocks, self.block_size, self.kv_heads)
        whole = empty_cache(self.layout, *sizes, self.head_size, self.dtype, device)
        other = whole
        if (self.layout, self.head_size) != (self.value_layout, self.value_head_size):
            other = empty_cache(
                self.value_layout, *sizes, self.value_head_size, self.dtype, device
            )
        for number, cache in enumerate((whole, other)):
            cache.copy_(any_bytes(cache.shape, self.dtype, seed + number))
        return whole[0], other[1]


def any_bytes(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Return random finite bit patterns: NaN is left out, as a copy may make it quiet."""
    generator = torch.Generator().manual_seed(seed)
    size = (*shape, dtype.itemsize)
    drawn = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    found = drawn.view(dtype).squeeze(-1)
    finite = torch.isfinite(found.float() if dtype in FP8_DTYPES else found)
    return torch.where(finite.unsqueeze(-1), drawn, 1).view(dtype).squeeze(-1)


def draw_sizes(pick: Random, dtypes: Sequence[torch.dtype]) -> CacheSizes:
    """Return cache sizes, odd ones among them, with any layouts."""
    block_size, head_size = pick.choice(BLOCK_SIZES), pick.choice(HEAD_SIZES)
    kv_heads, layout = pick.choice([1, 2, 3, 3]), pick.choice(LAYOUTS)
    corner = pick.random()
    if corner < 0.1:  # a token has more elements than a program may process
        block_size, kv_heads, head_size = 3, 3, 400
    elif corner < 0.2:
        block_size, kv_heads, head_size = 544, 1, 8
    return CacheSizes(
        num_blocks=pick.choice([1, 2, 4, 5]),
        block_size=block_size,
        kv_heads=kv_heads,
        head_size=head_size,
        value_head_size=pick.choice([head_size, 3, 16, 40]),
        dtype=pick.choice(dtypes),
        layout=layout,
        value_layout=pick.choice([layout, *LAYOUTS]),
    )


@dataclass(frozen=True)
class CacheWrite:
    """New tokens and the slots that they are written to.

    Args:
        slots: slot of each token. A token with a negative slot is not stored.
        padding: tokens past the end of the slot mapping.
        sizes: sizes of the cache.
        forms: memory layouts of the new keys and of the new values, each one of FORMS.
        stride: elements from one slot of the mapping to the next.
    """

    slots: tuple[int, ...]
    padding: int
    sizes: CacheSizes
    forms: tuple[str, str]
    stride: int
    seed: int

    def tokens(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Return new keys and values of random numbers, with NaN in the padding."""
        heads, count = self.sizes.kv_heads, len(self.slots) + self.padding
        made = []
        for number, size in enumerate(
            (self.sizes.head_size, self.sizes.value_head_size)
        ):
            new = any_bytes((count, heads, size), dtype, self.seed + 7 * number)
            new[len(self.slots) :] = NAN
            made.append(laid_out(new.to(device), self.forms[number]))
        return made

    def mapping(self, device: torch.device) -> Tensor:
        """Return the slots as a view of this stride, with slot 0 in the gaps."""
        wide = torch.zeros(len(self.slots), self.stride, dtype=torch.int64)
        wide[:, 0] = torch.tensor(self.slots, dtype=torch.int64)
        return wide.flatten().to(device)[:: self.stride]

    def written(self, cache: Tensor, new: Tensor) -> Tensor:
        """Return the same view of a copied allocation, with each token in its slot."""
        right = copy_of(cache)
        for token, slot in enumerate(self.slots):
            if slot >= 0:
                block_id, offset = divmod(slot, self.sizes.block_size)
                right[block_id, offset] = new[token].cpu()
        return right


def laid_out(tensor: Tensor, form: str) -> Tensor:
    """Return [tokens, heads, elements] as a view of that form, with NaN around it."""
    tokens, heads, size = tensor.shape

    def full(*shape: int) -> Tensor:
        return torch.full(shape, NAN, dtype=tensor.dtype, device=tensor.device)

    if form == "fused":
        wide = full(tokens, heads * size + 13)[:, 8 : 8 + heads * size]
        view = heads_of(wide, heads)
    elif form == "heads first":
        view = full(heads, tokens, size + 1)[..., :size].transpose(0, 1)
    elif form == "every other element":
        view = full(tokens, heads, 2 * size)[..., ::2]
    else:
        return tensor.contiguous()
    return view.copy_(tensor)


FORMS = ("packed", "fused", "heads first", "every other element")


@st.composite
def writes(
    draw: st.DrawFn, dtypes: Sequence[torch.dtype] = (*DTYPES[:3], *DTYPES)
) -> CacheWrite:
    """Return a write to scattered slots, the last one often among them, and negative ones."""
    pick = Random(draw(st.integers(0, 2**20)))
    sizes = draw_sizes(pick, dtypes)
    total = sizes.num_blocks * sizes.block_size
    count = min(pick.choice([0, 1, 2, 5, 9, 40]), total)
    slots = pick.sample(range(total), count)
    if count and total - 1 not in slots:
        slots[pick.randrange(count)] = pick.choice([total - 1, slots[0]])
    slots = list(dict.fromkeys(slots))
    for place in range(len(slots) + 1):
        if pick.random() < 0.2:
            slots.insert(place, pick.choice(PADDING))
    return CacheWrite(
        tuple(slots),
        pick.choice([0, 0, 1, 4]),
        sizes,
        (pick.choice(FORMS), pick.choice(FORMS)),
        pick.choice([1, 1, 2]),
        pick.randrange(2**16),
    )


def expect_written(
    setting: Setting,
    write: CacheWrite,
    dtype: torch.dtype,
    stored: Callable[[Tensor, int], Tensor],
    tokens: list[Tensor],
    **scales: Any,
) -> None:
    """Raise Disagreement if any byte differs from the expected one after a write."""
    caches = write.sizes.caches(setting.device, write.seed + 31)
    slot_mapping = write.mapping(setting.device)
    shared = caches[0].untyped_storage().data_ptr() == (
        caches[1].untyped_storage().data_ptr()
    )
    right = [
        write.written(cache, stored(new, number))
        for number, (cache, new) in enumerate(zip(caches, tokens, strict=True))
    ]
    if shared:  # one allocation: each half is in the memory around the other
        for one, other in (right, right[::-1]):
            as_other = one.as_strided(
                other.shape, other.stride(), other.storage_offset()
            )
            as_other.copy_(other)
    tensors = {name: each for name, each in scales.items() if isinstance(each, Tensor)}
    with kept(key=tokens[0], value=tokens[1], slot_mapping=slot_mapping, **tensors):
        found = setting.candidate.reshape_and_cache(
            *tokens, *caches, slot_mapping, **scales
        )
    expect_same("what a write returns", found, None)
    for name, cache, wanted in zip(("key", "value"), caches, right, strict=True):
        expect_memory(f"{name} cache", cache, wanted)


@law("reshape_and_cache", cases=writes())
def each_token_lands_in_its_slot_and_all_else_stays(
    setting: Setting, write: CacheWrite
) -> None:
    """Tokens past the last slot are padding. A token with a negative slot is not stored."""
    dtype = write.sizes.dtype
    tokens = write.tokens(setting.device, dtype)
    expect_written(setting, write, dtype, lambda new, _: new, tokens)


@law("reshape_and_cache", "gather_cache", cases=list(DTYPES))
def every_bit_pattern_survives(setting: Setting, dtype: torch.dtype) -> None:
    """Payloads of NaN, subnormals, minus zero: the operations move bytes, not numbers."""
    generator = torch.Generator().manual_seed(dtype.itemsize)
    size = (48, 1, 8, dtype.itemsize)
    drawn = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    drawn[::2, ..., -2:] = torch.tensor([0xF1, 0x7F], dtype=torch.uint8)
    key = drawn.view(dtype).squeeze(-1).to(setting.device)
    value = key.flip(0)
    cache = torch.zeros(2, 3, 16, 1, 8, dtype=dtype, device=setting.device)
    slots = torch.randperm(48, generator=generator)
    setting.candidate.reshape_and_cache(
        key, value, cache[0], cache[1], slots.to(setting.device)
    )
    for half, new in zip(cache.cpu(), (key.cpu(), value.cpu()), strict=True):
        expect_same("cache", as_integers(half.flatten(0, 1)[slots]), as_integers(new))
    found = setting.candidate.gather_cache(
        cache[0],
        cache[1],
        torch.tensor([[2, 0, 1]], dtype=torch.int32, device=setting.device),
        torch.tensor([0, 48], dtype=torch.int32, device=setting.device),
        48,
    )
    for half, read in zip(cache.cpu(), found, strict=True):
        right = half[[2, 0, 1]].flatten(0, 1)
        expect_same("gathered", as_integers(read.cpu()), as_integers(right))


def as_integers(tensor: Tensor) -> Tensor:
    """Return the bits of each element as an integer."""
    return packed(tensor).view(INTEGERS[tensor.element_size()])


def codes_of(dtype: torch.dtype) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the finite codes of an FP8 dtype from 0 up, and their numbers."""
    codes = np.arange(128, dtype=np.uint8)
    mantissa_bits = 2 if dtype == torch.float8_e5m2 else 3
    bias = 15 if dtype == torch.float8_e5m2 else 7
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / 2.0**mantissa_bits
    numbers = np.where(
        exponent == 0,
        fraction * 2.0 ** (1 - bias),
        (1 + fraction) * 2.0 ** (exponent.astype(np.float64) - bias),
    )
    count = 124 if dtype == torch.float8_e5m2 else 127
    return codes[:count], numbers[:count]


def nearest_codes(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the FP8 codes of float32 numbers: round to nearest even, saturate, keep NaN."""
    codes, exact = codes_of(dtype)
    sizes = numbers.double().abs().numpy()
    above = np.searchsorted(exact, sizes).clip(0, len(exact) - 1)
    below = (above - 1).clip(0)
    to_above, to_below = exact[above] - sizes, sizes - exact[below]
    is_even = codes[above] % 2 == 0
    takes_above = (to_above < to_below) | ((to_above == to_below) & is_even)
    found = np.where(takes_above | (sizes >= exact[-1]), codes[above], codes[below])
    signs = np.signbit(numbers.numpy()).astype(np.uint8) << 7
    found = np.where(np.isnan(sizes), 0x7F, found | signs).astype(np.uint8)
    return torch.from_numpy(found).view(dtype)


def draw_scale(pick: Random, heads: int, device: torch.device) -> Tensor | float:
    """Return a scale far from 1: a number, a scalar tensor, or one scale per head."""
    numbers = [pick.choice([0.013, 0.25, 0.3, 1.7, 40.0]) for _ in range(heads)]
    kind = pick.choice(["number", "tensor", *["a head", "a head, apart"] * 2])
    if kind == "number":
        return numbers[0]
    if kind == "tensor":
        return torch.tensor(numbers[0], device=device)
    if kind == "a head":
        return torch.tensor(numbers, device=device)
    wide = torch.full((heads, 2), 999.0)
    wide[:, 0] = torch.tensor(numbers)
    return wide.to(device)[:, 0]


def scale_column(scale: Tensor | float) -> Tensor:
    """Return a scale in float32 on the host, broadcastable to [tokens, heads, elements]."""
    found = torch.as_tensor(scale, dtype=torch.float32).cpu()
    return found[:, None] if found.dim() else found


@law("reshape_and_cache", cases=writes(dtypes=FP8_DTYPES))
def an_eight_bit_cache_holds_the_codes_next_to_the_quotients(
    setting: Setting, write: CacheWrite
) -> None:
    """Inputs are codes, midpoints of two codes, numbers next to midpoints and past the largest."""
    pick = Random(write.seed)
    dtype = pick.choice(DTYPES[:3])
    scales = {
        name: draw_scale(pick, write.sizes.kv_heads, setting.device)
        for name in ("k_scale", "v_scale")
    }
    _, exact = codes_of(write.sizes.dtype)
    halfway = (exact[1:] + exact[:-1]) / 2
    points = np.concatenate([exact, halfway, halfway * (1 + 2**-10), exact[-1:] * 4])
    tokens = write.tokens(setting.device, dtype)
    for new, scale in zip(tokens, scales.values(), strict=True):
        live = new[: len(write.slots)]
        drawn = [
            pick.choice(points) * pick.choice([-1, 1]) for _ in range(live.numel())
        ]
        numbers = torch.tensor(drawn).view(live.shape) * scale_column(scale)
        live.copy_(numbers.to(dtype))

    def stored(new: Tensor, number: int) -> Tensor:
        column = scale_column(list(scales.values())[number])
        return nearest_codes(new.cpu().float() / column, write.sizes.dtype)

    expect_written(setting, write, dtype, stored, tokens, **scales)


@law("reshape_and_cache", cases=list(FP8_DTYPES))
def numbers_past_the_largest_become_it_and_nan_stays(
    setting: Setting, dtype: torch.dtype
) -> None:
    """Infinities too. Minus zero and numbers that round to zero keep their sign."""
    largest, inf = torch.finfo(dtype).max, float("inf")
    numbers = [inf, -inf, 3e38, -3e38, 0.0, -0.0, 1e-30, -1e-30, NAN, -NAN]
    numbers += [largest, -largest, largest * 1.02, largest * 1.2, -1.2 * largest, 1.0]
    key = torch.tensor(numbers).view(2, 1, 8).to(setting.device)
    cache = torch.zeros(2, 1, 2, 1, 8, device=setting.device).to(dtype)
    slots = torch.tensor([1, 0], device=setting.device)
    setting.candidate.reshape_and_cache(key, -key, cache[0], cache[1], slots, 1.0, 1.0)
    for half, new in zip(cache.cpu(), (key.cpu(), -key.cpu()), strict=True):
        right = nearest_codes(new.flip(0), dtype).view(half.shape)
        is_nan = half.float().isnan()
        expect_same("where NaN stands", is_nan, right.float().isnan())
        for each in (half, right):
            each.view(torch.uint8)[is_nan] = 0
        expect_same("cache", packed(half), right)


@dataclass(frozen=True)
class CacheRead:
    """Sequences to gather from a cache.

    Args:
        lens: tokens of each sequence.
        rows: block ids of each sequence.
        sizes: sizes of the cache.
        padding: rows of the result after the last sequence.
        spare: columns of garbage past the end of the longest row.
        stride: elements from one entry of the table or the starts to the next.
    """

    lens: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    sizes: CacheSizes
    padding: int
    spare: int
    stride: int
    seed: int

    def table(self, device: torch.device) -> Tensor:
        """Return the block table, with garbage after each row and between entries."""
        width = max(map(len, self.rows), default=0) + self.spare
        wide = torch.tensor(GARBAGE, dtype=torch.int32)
        wide = wide.repeat(len(self.rows), width * self.stride)
        wide = wide[:, : width * self.stride].contiguous()
        for req, row in enumerate(self.rows):
            wide[req, : len(row) * self.stride : self.stride] = torch.tensor(
                row, dtype=torch.int32
            )
        return wide.to(device)[:, :: self.stride]

    def starts(self, device: torch.device) -> Tensor:
        """Return where each sequence starts in the result, and where the last one ends."""
        wide = torch.full((len(self.lens) + 1, self.stride), 10**6, dtype=torch.int32)
        wide[0, 0] = 0
        wide[1:, 0] = torch.tensor(self.lens, dtype=torch.int32).cumsum(0)
        return wide.flatten().to(device)[:: self.stride]

    def caches(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return caches with NaN in every slot that no sequence uses."""
        caches = self.sizes.caches(device, self.seed)
        size = self.sizes.block_size
        owned = torch.zeros(self.sizes.num_blocks, size, dtype=torch.bool)
        for length, row in zip(self.lens, self.rows, strict=True):
            for place in range(length):
                owned[row[place // size], place % size] = True
        for cache in caches:
            code = torch.tensor(NAN).to(cache.dtype).to(device)
            for block_id, offset in (~owned).nonzero().tolist():
                cache[block_id, offset] = code
        return caches

    def gathered(self, cache: Tensor) -> Tensor:
        """Return the sequences position by position, followed by zeros."""
        total = sum(self.lens) + self.padding
        right = torch.zeros(total, *cache.shape[2:], dtype=cache.dtype)
        token, held, size = 0, cache.cpu(), self.sizes.block_size
        for length, row in zip(self.lens, self.rows, strict=True):
            for place in range(length):
                right[token] = held[row[place // size], place % size]
                token += 1
        return right


@st.composite
def reads(draw: st.DrawFn, dtypes: Sequence[torch.dtype]) -> CacheRead:
    """Return ragged sequences that end on both sides of block edges, in blocks of any order."""
    pick = Random(draw(st.integers(0, 2**20)))
    sizes = draw_sizes(pick, dtypes)
    size = sizes.block_size
    edges = [0, 1, size - 1, size, size + 1, 2 * size, 3 * size, 3 * size + 1]
    most = 34 if size < 50 else size + 1
    reqs = pick.choice([0, 1, 2, 4] if size < 50 else [1])
    lens = tuple(min(pick.choice(edges), most) for _ in range(reqs))
    rows = tuple(
        tuple(
            pick.randrange(sizes.num_blocks)
            for _ in range(-(-length // size) + pick.choice([0, 0, 1]))
        )
        for length in lens
    )
    return CacheRead(
        lens,
        rows,
        sizes,
        padding=pick.choice([0, 0, 1, 5]),
        spare=pick.choice([0, 1, 2]),
        stride=pick.choice([1, 1, 2]),
        seed=pick.randrange(2**16),
    )


def expect_gathered(
    setting: Setting,
    read: CacheRead,
    right: Callable[[Tensor, int], Tensor],
    **options: Any,
) -> None:
    """Raise Disagreement if a gather reads another slot, or writes to one of its inputs."""
    caches = read.caches(setting.device)
    table, starts = read.table(setting.device), read.starts(setting.device)
    given = {"key_cache": caches[0], "value_cache": caches[1], "block_table": table}
    with kept(**given, seq_start_loc=starts):
        found = setting.candidate.gather_cache(
            **given,
            seq_start_loc=starts,
            num_tokens=sum(read.lens) + read.padding,
            **options,
        )
    expect_same("number of results", len(found), 2)
    for number, name in enumerate(("key", "value")):
        wanted = right(read.gathered(caches[number]), number)
        expect_same(name, packed(found[number]), wanted)
        expect_same(f"device of {name}", found[number].device, caches[number].device)
        expect_own_memory(name, found[number], **given)


@law("gather_cache", cases=reads((*DTYPES, *FP8_DTYPES)))
def a_gathered_sequence_is_its_slots_in_order(
    setting: Setting, read: CacheRead
) -> None:
    """Rows after the last sequence are zero. Bytes of an FP8 cache are returned unchanged."""
    expect_gathered(setting, read, lambda rows, _: rows)


@law("gather_cache", cases=list(FP8_DTYPES))
def every_fp8_code_is_read_as_its_number(setting: Setting, dtype: torch.dtype) -> None:
    """NaN stays NaN, the smallest numbers are exact, and zeros keep their sign."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).view(2, 16, 1, 8)
    cache = codes.to(setting.device)
    table = torch.tensor([[1, 0]], dtype=torch.int32, device=setting.device)
    starts = torch.tensor([0, 32], dtype=torch.int32, device=setting.device)
    found = setting.candidate.gather_cache(
        cache, cache, table, starts, 32, k_scale=1.0, v_scale=1.0, dtype=torch.float32
    )
    right = codes.flip(0).float().flatten(0, 1)
    for read in found:
        read, wanted = read.cpu().clone(), right.clone()
        expect_same("where NaN stands", read.isnan(), wanted.isnan())
        for each in (read, wanted):
            each[right.isnan()] = 0
        expect_same("gathered", packed(read), packed(wanted))


@law("gather_cache", cases=reads(FP8_DTYPES))
def gathered_codes_are_their_numbers_times_the_scale(
    setting: Setting, read: CacheRead
) -> None:
    """The product is rounded to float32, and once more to the requested dtype."""
    pick = Random(read.seed)
    dtype = pick.choice(DTYPES)
    scales = {
        name: draw_scale(pick, read.sizes.kv_heads, setting.device)
        for name in ("k_scale", "v_scale")
    }

    def right(rows: Tensor, number: int) -> Tensor:
        column = scale_column(list(scales.values())[number])
        # exact in float64: a code has four bits of mantissa, a scale 24
        return (rows.double() * column.double()).float().to(dtype)

    expect_gathered(setting, read, right, dtype=dtype, **scales)


@dataclass(frozen=True)
class Growth:
    """Sequences that grow step by step.

    Args:
        news: new tokens of each request, per step.
        block_size: slots per block.
        seed: seed of the order in which blocks are allocated.
    """

    news: tuple[tuple[int, ...], ...]
    block_size: int
    seed: int


@st.composite
def growths(draw: st.DrawFn) -> Growth:
    """Return chunked prefills and decodes, with idle requests between them."""
    pick = Random(draw(st.integers(0, 2**20)))
    size = pick.choice([1, 3, 4, 16])
    reqs = pick.choice([1, 2, 3])
    choices = [0, 1, 1, 2, size - 1, size, size + 1, 2 * size]
    steps = pick.choice([1, 2, 3])
    news = tuple(tuple(pick.choice(choices) for _ in range(reqs)) for _ in range(steps))
    return Growth(news, size, pick.randrange(2**16))


@law(
    "blocks_needed",
    "make_block_table",
    "append_blocks",
    "compute_slot_mapping_device",
    "reshape_and_cache",
    "gather_cache",
    cases=growths(),
)
def what_was_written_by_slot_is_read_by_table(setting: Setting, growth: Growth) -> None:
    """In each step rows grow, slots are computed, tokens are written and sequences read back."""
    candidate, device = setting.candidate, setting.device
    reqs, size = len(growth.news[0]), growth.block_size
    totals = [sum(step[req] for step in growth.news) for req in range(reqs)]
    width = max(candidate.blocks_needed(total, size) for total in totals)
    num_blocks = reqs * width + 1
    free = Random(growth.seed).sample(range(num_blocks), num_blocks)
    cache = torch.full((2, num_blocks, size, 2, 8), NAN, device=device)
    generator = torch.Generator().manual_seed(growth.seed)
    numbers = [torch.randn(total, 2, 8, generator=generator) for total in totals]
    table = candidate.make_block_table([[]] * reqs, width, device)
    held = torch.zeros(reqs, dtype=torch.int32)
    computed = [0] * reqs
    for news in growth.news:
        after = [old + new for old, new in zip(computed, news, strict=True)]
        more = [
            [
                free.pop()
                for _ in range(candidate.blocks_needed(n, size) - int(held[req]))
            ]
            for req, n in enumerate(after)
        ]
        held = candidate.append_blocks(table, held, more)
        starts = torch.tensor([0, *news]).cumsum(0).int().to(device)
        slots = candidate.compute_slot_mapping_device(
            starts, torch.tensor(computed).int().to(device), table, size, sum(news) + 2
        )
        key = torch.cat(
            [
                *(own[a:b] for own, a, b in zip(numbers, computed, after, strict=True)),
                torch.full((2, 2, 8), NAN),
            ]
        ).to(device)
        candidate.reshape_and_cache(key, -key, cache[0], cache[1], slots)
        computed = after
        ends = torch.tensor([0, *computed]).cumsum(0).int().to(device)
        found = candidate.gather_cache(cache[0], cache[1], table, ends, sum(computed))
        right = torch.cat([own[:n] for own, n in zip(numbers, computed, strict=True)])
        expect_same("keys read back", found[0].cpu(), right)
        expect_same("values read back", found[1].cpu(), -right)


@dataclass(frozen=True)
class Moves:
    """Blocks that are copied.

    Args:
        pairs: source block and destination block of each copy.
        sizes: sizes of one cache. A second cache differs from it only in the number of blocks.
        others: number of blocks of the destination, or of every further layer.
        layers: number of layers of a copy. Their layouts differ.
    """

    pairs: tuple[tuple[int, int], ...]
    sizes: CacheSizes
    others: int
    layers: int
    seed: int

    def mapping(self) -> Tensor:
        """Return the pairs as a tensor on the host."""
        return torch.tensor(self.pairs, dtype=torch.int64).view(-1, 2)

    def cache(self, device: torch.device, number: int, num_blocks: int) -> Tensor:
        """Return [2, num_blocks, ...] of random bytes. The number selects the layout."""
        layouts = (self.sizes.layout, self.sizes.value_layout, *LAYOUTS)
        one = self.sizes
        cache = empty_cache(
            layouts[number % len(layouts)],
            num_blocks,
            one.block_size,
            one.kv_heads,
            one.head_size,
            one.dtype,
            device,
        )
        return cache.copy_(any_bytes(cache.shape, one.dtype, self.seed + number))


@st.composite
def moves(draw: st.DrawFn, is_one_cache: bool) -> Moves:
    """Return pairs in which no block is written twice, or written and read in one cache."""
    pick = Random(draw(st.integers(0, 2**20)))
    sizes = draw_sizes(pick, (*DTYPES, *FP8_DTYPES))
    others = pick.choice([1, 3, 6])
    there = min(sizes.num_blocks, others) if is_one_cache else others
    given = pick.sample(range(there), pick.randint(0, there))
    here = there if is_one_cache else sizes.num_blocks
    taken = [block for block in range(here) if not is_one_cache or block not in given]
    pairs = tuple((pick.choice(taken), block) for block in given) if taken else ()
    return Moves(pairs, sizes, others, pick.choice([0, 1, 2, 4]), pick.randrange(2**16))


@law("copy_blocks", cases=moves(is_one_cache=True))
def a_copied_block_is_its_source_in_every_layer(setting: Setting, moved: Moves) -> None:
    """Keys and values are copied. Layers may have different strides and numbers of blocks."""
    caches = [
        moved.cache(
            setting.device, layer, moved.others if layer else moved.sizes.num_blocks
        )
        for layer in range(moved.layers)
    ]
    right = [copy_of(cache) for cache in caches]
    for cache in right:
        for source, destination in moved.pairs:
            for half in range(2):
                cache[half, destination] = cache[half, source].clone()
    mapping = moved.mapping()
    with kept(block_mapping=mapping):
        found = setting.candidate.copy_blocks(caches, mapping)
    expect_same("what a copy returns", found, None)
    for layer, (cache, wanted) in enumerate(zip(caches, right, strict=True)):
        expect_memory(f"cache of layer {layer}", cache, wanted)


@law("swap_blocks", cases=moves(is_one_cache=False))
def a_swapped_block_arrives_and_its_source_stays(
    setting: Setting, moved: Moves
) -> None:
    """Blocks are copied only from the first cache to the second, which has its own ids."""
    source = moved.cache(setting.device, 0, moved.sizes.num_blocks)
    destination = moved.cache(setting.device, 1, moved.others)
    right = copy_of(destination)
    for taken, given in moved.pairs:
        for half in range(2):
            right[half, given] = source[half, taken].cpu()
    mapping = moved.mapping()
    with kept(source=source, block_mapping=mapping):
        found = setting.candidate.swap_blocks(source, destination, mapping)
    expect_same("what a swap returns", found, None)
    expect_memory("destination", destination, right)


@law("swap_blocks", cases=[torch.float16, torch.float32, torch.float8_e4m3fn])
def blocks_come_back_from_the_host_as_they_went(
    setting: Setting, dtype: torch.dtype
) -> None:
    """Blocks are swapped out to a cache on the host, and swapped back into other blocks."""
    sizes = (4, 3, 2, 8)
    here = empty_cache("interleaved", *sizes, dtype, setting.device)
    here.copy_(any_bytes(here.shape, dtype, 5))
    there = empty_cache("hnd", 5, *sizes[1:], dtype)
    before = copy_of(here)
    setting.candidate.swap_blocks(here, there, torch.tensor([[3, 0], [1, 4]]))
    setting.candidate.swap_blocks(there, here, torch.tensor([[0, 2], [4, 0]]))
    before[:, 2], before[:, 0] = before[:, 3].clone(), before[:, 1].clone()
    expect_memory("cache", here, before)


AXES = ("half", "block", "slot", "head", "element")
FAR_AXES = AXES[:4]


@dataclass(frozen=True)
class FarSlots:
    """A cache with one stride so large that its axis' last entry is past 2**31 elements.

    The allocation has as much memory again before the cache, so that an address that wraps around
    stays inside of it. Only used elements are touched, so it costs address space and no memory.
    """

    axis: str

    def cache(self, device: torch.device) -> Tensor:
        """Return [2, 3, 3, 3, 3] elements of one byte each."""
        shape, strides, packed = (2, 3, 3, 3, 3), [0] * 5, 1
        for place in reversed(range(5)):
            if AXES[place] != self.axis:
                strides[place], packed = packed, packed * shape[place]
        far = AXES.index(self.axis)
        strides[far] = 2**31 // (shape[far] - 1) + 128
        front = 2**31
        memory = torch.empty(
            front + packed + 2**31 + 512, dtype=torch.float8_e5m2, device=device
        )
        cache = memory.as_strided(shape, strides, front)
        return cache.copy_(any_bytes(shape, torch.float8_e5m2, 3))


FAR = [FarSlots(axis) for axis in FAR_AXES]


@law("reshape_and_cache", cases=FAR)
def slots_past_two_billion_elements_are_written(
    setting: Setting, far: FarSlots
) -> None:
    cache, device = far.cache(setting.device), setting.device
    right = cache.cpu().clone()
    new = any_bytes((2, 3, 3, 3), torch.float8_e5m2, 9)
    key, value = new.float().to(device)
    slots = [8, 0, 5]
    for half in range(2):
        for token, slot in enumerate(slots):
            right[half, slot // 3, slot % 3] = new[half, token]
    mapping = torch.tensor(slots, device=device)
    setting.candidate.reshape_and_cache(
        key, value, cache[0], cache[1], mapping, 1.0, 1.0
    )
    expect_same("cache", packed(cache), packed(right))


@law("gather_cache", cases=FAR)
def slots_past_two_billion_elements_are_read(setting: Setting, far: FarSlots) -> None:
    cache, device = far.cache(setting.device), setting.device
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 9], dtype=torch.int32, device=device)
    found = setting.candidate.gather_cache(cache[0], cache[1], table, starts, 9)
    for half, read in enumerate(found):
        right = cache[half].cpu()[[2, 0, 1]].flatten(0, 1)
        expect_same("gathered", packed(read), packed(right))


@law("copy_blocks", "swap_blocks", cases=FAR)
def blocks_past_two_billion_elements_are_moved(setting: Setting, far: FarSlots) -> None:
    """Blocks are copied within a cache, out of it, and into it."""
    cache = far.cache(setting.device)
    small = torch.zeros(2, 3, 3, 3, 3, device=setting.device).to(cache.dtype)
    right, other = cache.cpu().clone(), small.cpu().clone()
    setting.candidate.copy_blocks([cache], torch.tensor([[2, 0]]))
    right[:, 0] = right[:, 2].clone()
    setting.candidate.swap_blocks(cache, small, torch.tensor([[2, 1], [1, 0]]))
    other[:, 1], other[:, 0] = right[:, 2], right[:, 1]
    setting.candidate.swap_blocks(small, cache, torch.tensor([[0, 2]]))
    right[:, 2] = other[:, 0]
    expect_same("cache", packed(cache), packed(right))
    expect_same("the other cache", packed(small), other)


@law("reshape_and_cache", cases=["token", "head"])
def new_tokens_far_apart_in_memory_are_found(setting: Setting, axis: str) -> None:
    """The tokens are a view of a large tensor, of which nothing else is touched."""
    shape, strides, compact = (3, 3, 3), [0, 0, 0], 1
    names = ("token", "head", "element")
    for place in reversed(range(3)):
        if names[place] != axis:
            strides[place], compact = compact, compact * 3
    strides[names.index(axis)] = 2**30 + 128
    front = 2**31
    long = torch.empty(front + 2**31 + 512, dtype=torch.float16, device=setting.device)
    key = long.as_strided(shape, strides, front)
    key.copy_(any_bytes(shape, torch.float16, 4))
    cache = torch.zeros(2, 1, 4, 3, 3, dtype=torch.float16, device=setting.device)
    slots = [2, 0, 3]
    mapping = torch.tensor(slots, device=setting.device)
    setting.candidate.reshape_and_cache(key, key, cache[0], cache[1], mapping)
    for half in cache.cpu():
        expect_same("cache", packed(half[0, slots]), packed(key))


def refused_write(**changes: Any) -> Callable[[Any, Tensor], Any]:
    """Return a write that is valid except for some arguments, given as values or functions."""

    def call(candidate: Any, cache: Tensor) -> Any:
        device = cache.device
        given: dict[str, Any] = {
            "key": torch.ones(3, 2, 8, device=device).to(
                changes.get("new", cache.dtype)
            ),
            "key_cache": cache[0],
            "value_cache": cache[1],
            "slot_mapping": torch.tensor([5, -1, 0]),
        }
        given["value"] = given["key"]
        for name, change in changes.items():
            if name in given or name in ("k_scale", "v_scale"):
                given[name] = change(given[name]) if callable(change) else change
        given["slot_mapping"] = given["slot_mapping"].to(device)
        return candidate.reshape_and_cache(**given)

    return call


def refused_read(**changes: Any) -> Callable[[Any, Tensor], Any]:
    """Return a gather that is valid except for some arguments."""

    def call(candidate: Any, cache: Tensor) -> Any:
        given: dict[str, Any] = {
            "key_cache": cache[0],
            "value_cache": cache[1],
            "block_table": torch.tensor([[2, 1], [0, 9]], dtype=torch.int32),
            "seq_start_loc": torch.tensor([0, 5, 7], dtype=torch.int32),
            "num_tokens": 8,
        }
        for name, change in changes.items():
            given[name] = change(given[name]) if callable(change) else change
        for name in ("block_table", "seq_start_loc"):
            given[name] = given[name].to(cache.device)
        return candidate.gather_cache(**given)

    return call


def refused_copy(pairs: Any) -> Callable[[Any, Tensor], Any]:
    """Return a copy of these pairs of blocks."""
    return lambda candidate, cache: candidate.copy_blocks([cache], torch.tensor(pairs))


def refused_swap(pairs: Any) -> Callable[[Any, Tensor], Any]:
    """Return a swap of these pairs of blocks, out of two blocks into a cache of three."""
    return lambda candidate, cache: candidate.swap_blocks(
        cache[:, :2].clone(), cache, torch.tensor(pairs)
    )


def ints(*numbers: Any) -> Tensor:
    """Return int32 numbers."""
    return torch.tensor(numbers, dtype=torch.int32)


E4M3 = torch.float8_e4m3fn
REFUSED: dict[str, tuple[torch.dtype, Callable[[Any, Tensor], Any]]] = {
    name: (torch.float32, call)
    for name, call in {
        "a slot past the last": refused_write(slot_mapping=torch.tensor([5, 12, 0])),
        "a slot far past the last": refused_write(
            slot_mapping=torch.tensor([5, 2**33])
        ),
        "two tokens for one slot": refused_write(slot_mapping=torch.tensor([5, -1, 5])),
        "more slots than tokens": refused_write(slot_mapping=torch.arange(4)),
        "slots of 32 bits": refused_write(slot_mapping=ints(5, -1, 0)),
        "slots in two axes": refused_write(slot_mapping=torch.tensor([[5, -1, 0]])),
        "keys of another dtype": refused_write(key=lambda key: key.half()),
        "values of another dtype": refused_write(value=lambda value: value.half()),
        "keys of fewer heads": refused_write(key=lambda key: key[:, :1]),
        "values of fewer heads": refused_write(value=lambda value: value[:, :1]),
        "keys of smaller heads": refused_write(key=lambda key: key[..., :4]),
        "values of smaller heads": refused_write(value=lambda value: value[..., :4]),
        "fewer values than slots": refused_write(value=lambda value: value[:2]),
        "a value cache of another dtype": refused_write(value_cache=torch.Tensor.half),
        "a value cache of fewer blocks": refused_write(value_cache=lambda c: c[:2]),
        "a value cache of smaller blocks": refused_write(
            value_cache=lambda c: c[:, :2]
        ),
        "a value cache of fewer heads": refused_write(
            value_cache=lambda c: c[..., :1, :]
        ),
        "scales for a cache that is not FP8": refused_write(k_scale=0.5, v_scale=0.5),
        "values read from another dtype": refused_read(value_cache=torch.Tensor.half),
        "values read from fewer blocks": refused_read(value_cache=lambda c: c[:2]),
        "values read from fewer heads": refused_read(
            value_cache=lambda c: c[..., :1, :]
        ),
        "a used entry past the cache": refused_read(block_table=ints([2, 3], [0, 9])),
        "a negative used entry": refused_read(block_table=ints([2, 1], [-1, 9])),
        "a sequence longer than its row": refused_read(seq_start_loc=ints(0, 9, 9)),
        "starts that do not begin at 0": refused_read(seq_start_loc=ints(1, 5, 7)),
        "starts that fall": refused_read(seq_start_loc=ints(0, 5, 4)),
        "sequences that end past the result": refused_read(num_tokens=6),
        "less than no rows": refused_read(num_tokens=-1),
        "one start too few": refused_read(seq_start_loc=ints(0, 5)),
        "starts of 64 bits": refused_read(seq_start_loc=torch.Tensor.long),
        "a table of 64 bits": refused_read(block_table=torch.Tensor.long),
        "a dtype for a cache that is not FP8": refused_read(dtype=torch.float16),
        "scales for numbers as they are": refused_read(k_scale=0.5, v_scale=0.5),
        "a copy from a block past the last": refused_copy([[0, 1], [3, 2]]),
        "a copy to a block past the last": refused_copy([[0, 1], [0, 3]]),
        "a copy from a negative block": refused_copy([[0, 1], [-1, 2]]),
        "a copy to a negative block": refused_copy([[0, 1], [0, -1]]),
        "two copies to one block": refused_copy([[0, 2], [1, 2]]),
        "a block that is read and written": refused_copy([[0, 1], [1, 2]]),
        "a block that is written and read": refused_copy([[1, 2], [0, 1]]),
        "a block onto itself": refused_copy([[1, 1]]),
        "triples of blocks": refused_copy([[0, 1, 2]]),
        "pairs that are no integers": refused_copy([[0.0, 1.0]]),
        "a swap from a block past the last": refused_swap([[0, 1], [2, 0]]),
        "a swap to a block past the last": refused_swap([[0, 1], [0, 3]]),
        "a swap from a negative block": refused_swap([[0, 1], [-1, 2]]),
        "a swap to a negative block": refused_swap([[0, 1], [1, -1]]),
        "two swaps to one block": refused_swap([[0, 2], [1, 2]]),
        "a swap into blocks of another size": lambda candidate, cache: (
            candidate.swap_blocks(
                cache[:, :, :2].clone(), cache, torch.tensor([[0, 1]])
            )
        ),
        "a swap into another dtype": lambda candidate, cache: candidate.swap_blocks(
            cache.half(), cache, torch.tensor([[0, 1]])
        ),
        "layers of other blocks": lambda candidate, cache: candidate.copy_blocks(
            [cache, cache[:, :, :2].clone()], torch.tensor([[0, 1]])
        ),
        "a second layer with fewer blocks": lambda candidate, cache: (
            candidate.copy_blocks([cache, cache[:, :1].clone()], torch.tensor([[0, 1]]))
        ),
        "keys without values": lambda candidate, cache: candidate.copy_blocks(
            [cache[:1]], torch.tensor([[0, 1]])
        ),
    }.items()
} | {
    name: (E4M3, call)
    for name, call in {
        "an FP8 cache without scales": refused_write(new=torch.float32),
        "the scale of the keys alone": refused_write(new=torch.float32, k_scale=0.5),
        "the scale of the values alone": refused_write(new=torch.float32, v_scale=0.5),
        "a scale of nothing": refused_write(
            new=torch.float32, k_scale=0.0, v_scale=0.5
        ),
        "a negative scale": refused_write(new=torch.float32, k_scale=0.5, v_scale=-0.5),
        "a scale that is no number": refused_write(
            new=torch.float32, k_scale=NAN, v_scale=0.5
        ),
        "scales of too many heads": refused_write(
            new=torch.float32, k_scale=torch.ones(3), v_scale=torch.ones(3)
        ),
        "numbers that are FP8 already": refused_write(k_scale=0.5, v_scale=0.5),
        "a gather in another dtype without scales": refused_read(dtype=torch.float16),
        "a gather with scales and no dtype": refused_read(k_scale=0.5, v_scale=0.5),
        "a gather with one scale": refused_read(k_scale=0.5, dtype=torch.float16),
        "a gather with the other scale": refused_read(v_scale=0.5, dtype=torch.float16),
        "a gather with a scale of nothing": refused_read(
            k_scale=0.0, v_scale=0.5, dtype=torch.float16
        ),
        "a gather with a negative scale": refused_read(
            k_scale=0.5, v_scale=-0.5, dtype=torch.float16
        ),
        "a gather in integers": refused_read(
            k_scale=0.5, v_scale=0.5, dtype=torch.int32
        ),
        "a gather in FP8 with scales": refused_read(
            k_scale=0.5, v_scale=0.5, dtype=E4M3
        ),
    }.items()
}


@law(
    "reshape_and_cache",
    "gather_cache",
    "copy_blocks",
    "swap_blocks",
    cases=list(REFUSED),
    claim="refuses contents",
)
def what_would_leave_the_cache_is_rejected_and_nothing_written(
    setting: Setting, case: str
) -> None:
    """The cache is in the middle of an allocation that is compared, so that a kernel that writes
    past its end is detected and does not crash."""
    dtype, call = REFUSED[case]
    memory = torch.zeros(5000, device=setting.device).to(dtype)
    cache = memory[2000:3000][: 2 * 3 * 4 * 2 * 8].view(2, 3, 4, 2, 8)
    cache.copy_(any_bytes(cache.shape, dtype, 1))
    expect_all_refused(case, lambda: call(setting.candidate, cache), cache=cache)
