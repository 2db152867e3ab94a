"""Laws of `gather_cache`: sequences are read through their block table into packed tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..candidates.setting import Setting
from ..cases.batches import GARBAGE, NAN
from ..cases.caches import DTYPES, FP8, CacheSizes, draw_scale, draw_sizes, scale_column
from ..cases.reuse import compiled
from ..checks.canaries import expect_own_memory, kept, packed
from ..checks.expect import expect_same
from .law import law


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
            for position in range(length):
                owned[row[position // size], position % size] = True
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
            for position in range(length):
                right[token] = held[row[position // size], position % size]
                token += 1
        return right


@st.composite
def reads(draw: st.DrawFn, dtypes: Sequence[torch.dtype]) -> CacheRead:
    """Return ragged sequences that end on both sides of block edges, in blocks of any order."""
    pick = Random(draw(st.integers(0, 2**20)))
    kernel = compiled(pick)
    sizes = draw_sizes(pick, kernel, dtypes)
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
        stride=kernel.choice([1, 1, 2]),
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


@law("gather_cache", cases=reads((*DTYPES, *FP8)))
def a_gathered_sequence_is_its_slots_in_order(
    setting: Setting, read: CacheRead
) -> None:
    """Rows after the last sequence are zero. Bytes of an FP8 cache are returned unchanged."""
    expect_gathered(setting, read, lambda rows, _: rows)


def expect_same_numbers(what: str, found: Tensor, right: Tensor) -> None:
    """Raise a Disagreement if decoded numbers are not exactly the expected ones.

    Conversions of a chip decode a code of NaN without its sign, so NaN may have any bits.
    """
    found, right = packed(found), packed(right)
    is_nan = right.isnan()
    if found.shape == right.shape and found.dtype == right.dtype:
        expect_same(f"where {what} has NaN", found.isnan(), is_nan)
        found, right = (half.masked_fill(is_nan, 0) for half in (found, right))
    expect_same(what, found, right)


@law("gather_cache", cases=list(FP8))
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
        expect_same_numbers("gathered", read, right)


@law("gather_cache", cases=reads(FP8))
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
    size = compiled(pick).choice([1, 3, 4, 16])
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
def tokens_written_by_slot_mapping_are_read_by_block_table(
    setting: Setting, growth: Growth
) -> None:
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
