"""Does every byte arrive where it should, and nowhere else?"""

from dataclasses import dataclass

import pytest
import torch
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.conformance.generators.batches import (
    DTYPES,
    GARBAGE,
    LAYOUTS,
    NAN,
    Plan,
    build,
    empty_cache,
    plans,
)
from pagetwin.conformance.oracles.dense import same_bits
from pagetwin.contract.kinds import FP8_DTYPES
from torch import Tensor


@dataclass(frozen=True)
class Write:
    """What to write where: a slot or -1 for each token; further tokens are padding."""

    slots: tuple[int, ...]
    padding: int
    num_blocks: int
    block_size: int
    kv_heads: int
    head_size: int
    value_head_size: int
    dtype: torch.dtype
    layout: str
    value_layout: str
    fused: bool
    seed: int

    def caches(
        self, device: torch.device, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return a key cache and a value cache of NaN, with different strides."""
        sizes = (self.num_blocks, self.block_size, self.kv_heads)
        dtype = dtype or self.dtype
        return (
            empty_cache(self.layout, *sizes, self.head_size, dtype, device)[0],
            empty_cache(self.value_layout, *sizes, self.value_head_size, dtype, device)[
                1
            ],
        )

    def tokens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return key and value, as slices of a fused projection or by themselves."""
        generator = torch.Generator().manual_seed(self.seed)
        count = len(self.slots) + self.padding
        widths = [self.kv_heads * n for n in (self.head_size, self.value_head_size)]
        # in front of them stands what would be the queries
        fused = torch.randn(count, 8 + sum(widths), generator=generator)
        key, value = fused.to(device, self.dtype)[:, 8:].split(widths, dim=1)
        key = key.unflatten(1, (self.kv_heads, self.head_size))
        value = value.unflatten(1, (self.kv_heads, self.value_head_size))
        # padding decides whether both have the same strides
        if not self.fused:
            key = key.contiguous()
        if self.fused == bool(self.padding):
            value = value.contiguous()
        return key, value

    def mapping(self, device: torch.device) -> Tensor:
        """Return the slots as the operation takes them."""
        return torch.tensor(self.slots, dtype=torch.int64, device=device)

    def written(self, cache: Tensor, tokens: Tensor) -> Tensor:
        """Return what a cache holds once each token stands in its slot, on the host."""
        expected = cache.cpu().clone(memory_format=torch.contiguous_format)
        for token, slot in enumerate(self.slots):
            if slot >= 0:
                expected[divmod(slot, self.block_size)] = tokens[token].cpu()
        return expected


@st.composite
def writes(draw: st.DrawFn) -> Write:
    """Return a write whose slots are scattered, some of them none."""
    block_size = draw(st.sampled_from([1, 3, 16, 16, 24, 544]))
    num_blocks = draw(st.integers(1, 4))
    slots = draw(
        st.lists(st.integers(0, num_blocks * block_size - 1), max_size=9, unique=True)
    )
    holes = draw(st.sets(st.integers(0, 8)))
    head_size = draw(st.sampled_from([1, 8, 24, 80]))
    return Write(
        slots=tuple(
            -1 - 6 * (place % 2) if place in holes else slot
            for place, slot in enumerate(slots)
        ),
        padding=draw(st.sampled_from([0, 0, 1, 4])),
        num_blocks=num_blocks,
        block_size=block_size,
        kv_heads=draw(st.sampled_from([1, 2, 3])),
        head_size=head_size,
        value_head_size=draw(st.sampled_from([head_size, head_size, 3, 16, 100])),
        dtype=draw(st.sampled_from(DTYPES)),
        layout=draw(st.sampled_from(LAYOUTS)),
        value_layout=draw(st.sampled_from(LAYOUTS)),
        fused=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )


@given(write=writes())
def test_each_token_lands_in_its_slot_and_all_else_stays(
    write: Write, twin: Twin, device: torch.device
) -> None:
    """The whole cache is compared, bit for bit: NaN stays where nothing was written."""
    caches = write.caches(device)
    key, value = write.tokens(device)
    inputs = key.clone(), value.clone()
    expected = list(map(write.written, caches, inputs))
    slot_mapping = write.mapping(device)
    assert twin.reshape_and_cache(key, value, *caches, slot_mapping) is None
    assert all(map(same_bits, caches, expected))
    assert same_bits(key, inputs[0]) and same_bits(value, inputs[1])
    assert slot_mapping.tolist() == list(write.slots)


@given(write=writes())
def test_a_padded_layout_keeps_what_lies_between_its_rows(
    write: Write, twin: Twin, device: torch.device
) -> None:
    """A view of a wider allocation: the bytes beside it belong to somebody else."""
    sizes = (write.num_blocks, write.block_size, write.kv_heads)
    widths = write.head_size, write.value_head_size
    wholes = [
        torch.full((*sizes, width + 5), 7.0, dtype=write.dtype).to(device)
        for width in widths
    ]
    caches = [w[..., :width] for w, width in zip(wholes, widths, strict=True)]
    twin.reshape_and_cache(*write.tokens(device), *caches, write.mapping(device))
    for whole, width in zip(wholes, widths, strict=True):
        assert bool((whole[..., width:] == 7).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_bit_pattern_survives(
    dtype: torch.dtype, twin: Twin, device: torch.device
) -> None:
    """NaN payloads, subnormals and minus zero: what is moved is bytes, not numbers."""
    integer = torch.int16 if dtype.itemsize == 2 else torch.int32
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**15), 2**15, (64, 1, 8), generator=generator)
    if dtype.itemsize == 4:
        patterns = patterns * 65537
    key = patterns.to(integer).view(dtype).to(device)
    cache = torch.zeros(2, 4, 16, 1, 8, dtype=dtype, device=device)
    slots = torch.randperm(64, generator=generator).to(device)
    twin.reshape_and_cache(key, key, cache[0], cache[1], slots)
    assert same_bits(cache[0].view(64, 1, 8)[slots], key)
    table = torch.arange(4, dtype=torch.int32, device=device).view(1, 4)
    starts = torch.tensor([0, 64], dtype=torch.int32, device=device)
    for gathered in twin.gather_cache(cache[0], cache[1], table, starts, 64):
        assert same_bits(gathered[slots], key)


@given(plan=plans(), padding=st.integers(0, 3))
def test_a_gathered_sequence_is_its_slots_in_order(
    plan: Plan, padding: int, twin: Twin, device: torch.device
) -> None:
    """What lies past the last sequence is zero, whatever NaN the cache holds."""
    batch = build(plan, device)
    starts = [sum(plan.kv_lens[:req]) for req in range(len(plan.kv_lens) + 1)]
    total = starts[-1] + padding
    gathered = twin.gather_cache(
        batch.key_cache,
        batch.value_cache,
        batch.block_table,
        torch.tensor(starts, dtype=torch.int32, device=device),
        total,
    )
    shape = (total, plan.kv_heads, plan.head_size)
    for result, cache in zip(
        gathered, (batch.key_cache.cpu(), batch.value_cache.cpu()), strict=True
    ):
        expected = torch.zeros(shape, dtype=plan.dtype)
        for start, kv_len, row in zip(starts, plan.kv_lens, batch.rows, strict=False):
            for position in range(kv_len):
                block_id = row[position // plan.block_size]
                expected[start + position] = cache[block_id, position % plan.block_size]
        assert same_bits(result, expected)


def test_what_was_written_is_read_back(twin: Twin, device: torch.device) -> None:
    """Slots, write and gather agree about where a position lies."""
    query_lens, computed, block_size = [5, 1, 20], [0, 33, 3], 16
    rows = [[9], [4, 0, 7], [2, 11]]
    generator = torch.Generator().manual_seed(1)
    seq_lens = [new + old for new, old in zip(query_lens, computed, strict=True)]
    sequences = [torch.randn(n, 2, 8, generator=generator) for n in seq_lens]
    cache = torch.full((2, 12, block_size, 2, 8), NAN, device=device)
    history = twin.compute_slot_mapping_batch(computed, [0] * 3, rows, block_size)
    slots = twin.compute_slot_mapping_batch(query_lens, computed, rows, block_size)
    for mapping, parts in (
        (history, [seq[:old] for seq, old in zip(sequences, computed, strict=True)]),
        (slots, [seq[old:] for seq, old in zip(sequences, computed, strict=True)]),
    ):
        key = torch.cat(parts).to(device)
        twin.reshape_and_cache(key, -key, cache[0], cache[1], mapping.to(device))
    starts = torch.tensor([0, 5, 39, 62], dtype=torch.int32, device=device)
    table = twin.make_block_table(rows, device=device)
    key, value = twin.gather_cache(cache[0], cache[1], table, starts, 62)
    assert torch.equal(key.cpu(), torch.cat(sequences))
    assert torch.equal(value, -key)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2])
def test_slots_past_two_billion_elements_are_written_and_read(
    dtype: torch.dtype, twin: Twin, device: torch.device
) -> None:
    """slot * stride passes 2**31 here; in 32 bits it wraps to memory before the cache."""
    num_blocks = 2**31 // 1024 + 5
    # nothing is touched but the blocks that are used, so this costs addresses and no memory
    caches = [
        torch.empty(num_blocks, 16, 1, 64, dtype=dtype, device=device) for _ in range(2)
    ]
    scales = (1.0, 1.0) if dtype in FP8_DTYPES else ()
    key = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(2))
    key = key.to(device, torch.float16)
    high = num_blocks - 1
    slots = [16 * high + 15, 0, 16 * high]
    mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    for cache in caches:
        cache[high], cache[0] = NAN, NAN
    twin.reshape_and_cache(key, -key, caches[0], caches[1], mapping, *scales)
    for cache, new in zip(caches, (key, -key), strict=True):
        written = new.to(dtype)
        assert same_bits(cache[high, 15], written[0])
        assert same_bits(cache[0, 0], written[1])
        assert same_bits(cache[high, 0], written[2])
        assert int(cache[high].float().isnan().any(-1).sum()) == 14
        assert int(cache[0].float().isnan().any(-1).sum()) == 15
    table = torch.tensor([[high]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 16], dtype=torch.int32, device=device)
    gathered, _ = twin.gather_cache(caches[0], caches[1], table, starts, 16)
    assert same_bits(gathered, caches[0][high])


def test_tokens_that_lie_far_apart_are_found(twin: Twin, device: torch.device) -> None:
    """A slice of a long tensor: token * stride passes 2**31 at the third token."""
    stride = 2**30 + 64
    long = torch.empty(2 * stride + 64, dtype=torch.float16, device=device)
    key = long.as_strided((3, 1, 64), (stride, 64, 1))
    key.copy_(torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(5)))
    cache = torch.zeros(2, 1, 16, 1, 64, dtype=torch.float16, device=device)
    slots = torch.tensor([4, 9, 2], device=device)
    twin.reshape_and_cache(key, key, cache[0], cache[1], slots)
    assert same_bits(cache[0, 0, slots], key) and same_bits(cache[0], cache[1])


def test_slots_may_be_a_view_with_any_strides(twin: Twin, device: torch.device) -> None:
    cache = torch.full((2, 3, 4, 1, 8), NAN, device=device)
    key = torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(6)).to(device)
    slots = torch.tensor([7, 0, 2, 0, 11, 0], device=device)[::2]
    twin.reshape_and_cache(key, -key, cache[0], cache[1], slots)
    flat = cache.flatten(1, 2)
    assert same_bits(flat[0, slots], key) and same_bits(flat[1, slots], -key)
    assert int(flat[0].isnan().all(-1).sum()) == 9


def test_blocks_past_two_billion_elements_are_copied(
    twin: Twin, device: torch.device
) -> None:
    """The value half alone begins past 2**31 elements here."""
    num_blocks = 2**31 // 1024 + 5
    shape = (2, num_blocks, 16, 1, 64)
    cache = torch.empty(shape, dtype=torch.float16, device=device)
    high = num_blocks - 1
    block = torch.randn(2, 16, 1, 64, generator=torch.Generator().manual_seed(4))
    block = block.to(device, torch.float16)
    cache[:, high], cache[:, high - 2], cache[:, 1] = block, NAN, NAN
    pairs = torch.tensor([[high, 1], [high, high - 2]])
    twin.copy_blocks([cache], pairs)
    for copied in (high, high - 2, 1):
        assert same_bits(cache[:, copied], block)


@st.composite
def mappings(
    draw: st.DrawFn, num_source: int, num_destination: int, same: bool
) -> list[list[int]]:
    """Return pairs in which no destination comes twice, nor is a source of the same cache."""
    destinations = draw(
        st.lists(st.integers(0, num_destination - 1), unique=True, max_size=4)
    )
    sources = [
        block for block in range(num_source) if not same or block not in destinations
    ]
    if not sources:
        return []
    return [[draw(st.sampled_from(sources)), block] for block in destinations]


@given(data=st.data(), write=writes(), layers=st.integers(0, 3))
def test_a_copied_block_is_its_source_in_every_layer(
    data: st.DataObject, write: Write, layers: int, twin: Twin, device: torch.device
) -> None:
    num_blocks = 5
    pairs = data.draw(mappings(num_blocks, num_blocks, same=True))
    dtype = data.draw(st.sampled_from([*DTYPES, *FP8_DTYPES]))
    sizes = (num_blocks, min(write.block_size, 24), write.kv_heads, write.head_size)
    caches = []
    for layer in range(layers):
        cache = empty_cache(write.layout, *sizes, dtype)
        generator = torch.Generator().manual_seed(layer)
        cache[:, :3] = torch.randn(cache[:, :3].shape, generator=generator).to(dtype)
        caches.append(cache.to(device))
    expected = [cache.cpu().clone() for cache in caches]
    for cache in expected:
        before = cache.clone()
        for source, destination in pairs:
            cache[:, destination] = before[:, source]
    mapping = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    assert twin.copy_blocks(caches, mapping) is None
    for cache, wanted in zip(caches, expected, strict=True):
        assert same_bits(cache, wanted)


@given(data=st.data(), write=writes(), there=st.sampled_from(["host", "device"]))
def test_a_swapped_block_is_its_source_and_the_rest_stays(
    data: st.DataObject, write: Write, there: str, twin: Twin, device: torch.device
) -> None:
    """In both directions, and between caches of different sizes."""
    pairs = data.draw(mappings(3, 5, same=False))
    dtype = data.draw(st.sampled_from([*DTYPES, *FP8_DTYPES]))
    sizes = (min(write.block_size, 24), write.kv_heads, write.head_size)
    generator = torch.Generator().manual_seed(write.seed)
    source = torch.randn(2, 3, *sizes, generator=generator).to(dtype)
    destination = empty_cache(write.layout, 5, *sizes, dtype)
    expected = destination.clone()
    for taken, given_block in pairs:
        expected[:, given_block] = source[:, taken]
    places = (device, "cpu") if there == "host" else ("cpu", device)
    source, destination = source.to(places[0]), destination.to(places[1])
    before = source.clone()
    mapping = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    assert twin.swap_blocks(source, destination, mapping) is None
    assert same_bits(destination, expected)
    assert same_bits(source, before)


def test_every_argument_of_a_gather_changes_something(
    twin: Twin, device: torch.device
) -> None:
    batch = build(Plan((1, 1), (20, 20)), device)
    starts = torch.tensor([0, 20, 40], dtype=torch.int32, device=device)
    arguments = {
        "key_cache": batch.key_cache,
        "value_cache": batch.value_cache,
        "block_table": batch.block_table,
        "seq_start_loc": starts,
        "num_tokens": 40,
    }
    before = twin.gather_cache(**arguments)
    changes = {
        "key_cache": batch.key_cache * 2,
        "value_cache": batch.value_cache * 2,
        "block_table": batch.block_table.flip(0),
        "seq_start_loc": starts - (starts == 20).int(),
        "num_tokens": 41,
    }
    for name, change in changes.items():
        after = twin.gather_cache(**(arguments | {name: change}))
        assert not all(map(same_bits, before, after)), name


def test_the_starts_of_a_gather_may_be_a_view_with_any_strides(
    twin: Twin, device: torch.device
) -> None:
    batch = build(Plan((1, 1), (20, 9)), device)
    starts = torch.tensor([0, 20, 29], dtype=torch.int32, device=device)
    wide = starts.repeat_interleave(2).clone()
    wide[1::2] = 1000
    caches = (batch.key_cache, batch.value_cache, batch.block_table)
    one = twin.gather_cache(*caches, starts, 29)
    other = twin.gather_cache(*caches, wide[::2], 29)
    assert all(map(same_bits, one, other))


@pytest.mark.parametrize("fault", ["shifted", "swapped", "also elsewhere"])
def test_a_wrong_write_is_seen(fault: str, reference: Twin) -> None:
    cache = torch.full((2, 3, 4, 1, 8), NAN)
    key = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(3))
    expected = cache.clone()
    expected[0, 2, 1], expected[0, 0, 3] = key[0], key[1]
    expected[1] = expected[0]
    slots = torch.tensor([9, 3])
    reference.reshape_and_cache(key, key, cache[0], cache[1], slots)
    assert same_bits(cache, expected)
    broken = torch.full_like(cache, NAN)
    wrong = {"shifted": slots + 1, "swapped": slots.flip(0), "also elsewhere": slots}
    reference.reshape_and_cache(key, key, broken[0], broken[1], wrong[fault])
    if fault == "also elsewhere":
        broken[1, 1, 0] = 0
    assert not same_bits(broken, expected)


# ---- eight bits


SCALES = ("number", "one for all", "one of one", "one a head", "every other one")


def scale_of(kind: str, heads: int, seed: int, device: torch.device) -> Tensor | float:
    """Return a scale that is no power of two, so that dividing by it rounds."""
    generator = torch.Generator().manual_seed(seed)
    numbers = 0.01 + torch.rand(2 * heads, generator=generator) / 20
    if kind == "number":
        return float(numbers[0])
    return {
        "one for all": numbers[0],
        "one of one": numbers[:1],
        "one a head": numbers[:heads],
        "every other one": numbers[::2],
    }[kind].to(device)


def on_host(scale: Tensor | float) -> Tensor:
    """Return a scale as [1] or [heads, 1] on the host."""
    return torch.as_tensor(scale).cpu().reshape(-1, 1)


def nearest(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the FP8 numbers closest to float32 ones, the even one of two as close.

    Every distance is taken, in float64: it shares nothing with how anyone rounds.
    """
    codes = torch.arange(128, dtype=torch.uint8)
    candidates = codes.view(dtype).double()
    codes = codes[candidates.isfinite()]
    candidates = candidates[candidates.isfinite()]
    size = numbers.double().abs().clamp(max=float(candidates[-1]))
    # of two as close the even code comes first, and argmin takes the first
    order = torch.cat([torch.arange(0, len(codes), 2), torch.arange(1, len(codes), 2)])
    distance = (size[..., None] - candidates[order]).abs()
    chosen = codes[order][distance.argmin(-1)]
    return (chosen | (numbers.signbit() * 128).to(torch.uint8)).view(dtype)


@given(data=st.data(), write=writes())
def test_a_number_is_divided_by_its_scale_and_rounded_to_the_nearest(
    data: st.DataObject, write: Write, twin: Twin, device: torch.device
) -> None:
    """The whole cache is compared: NaN stays in every slot that no token has."""
    dtype = data.draw(st.sampled_from(FP8_DTYPES))
    caches = write.caches(device, dtype)
    scales = [
        scale_of(data.draw(st.sampled_from(SCALES)), write.kv_heads, seed, device)
        for seed in (write.seed, write.seed + 1)
    ]
    new = write.tokens(device)
    expected = [
        write.written(cache, nearest(tokens.cpu().float() / on_host(scale), dtype))
        for cache, tokens, scale in zip(caches, new, scales, strict=True)
    ]
    inputs = [tokens.clone() for tokens in new]
    assert twin.reshape_and_cache(*new, *caches, write.mapping(device), *scales) is None
    assert all(map(same_bits, caches, expected))
    assert all(map(same_bits, new, inputs))


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_the_division_is_rounded_once(
    dtype: torch.dtype, twin: Twin, device: torch.device
) -> None:
    """Quotients halfway between two numbers; multiplying by the inverse misses some of them."""
    scales = torch.tensor([0.3, 0.19, 41.0, 0.97])
    finite = torch.arange(120, dtype=torch.uint8).view(dtype).float()
    halfway = (finite[1:] + finite[:-1]) / 2
    key = (halfway * scales[:, None])[None]
    quotient = key / scales[:, None]
    inverse = key * (1 / scales)[:, None]
    assert not same_bits(nearest(quotient, dtype), nearest(inverse, dtype))
    cache = torch.zeros(2, 1, 1, 4, 119, device=device).to(dtype)
    slots = torch.tensor([0], device=device)
    # one number for all, then one a head
    for scale, rows in [(float(scales[0]), slice(1)), (scales.to(device), slice(4))]:
        new = key.to(device)
        twin.reshape_and_cache(new, new, cache[0], cache[1], slots, scale, scale)
        expected = nearest(quotient, dtype)[:, rows]
        for half in cache.cpu():
            assert same_bits(half[0, :, rows], expected)


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_eight_bits_beside_a_padded_row_stay(
    dtype: torch.dtype, twin: Twin, device: torch.device
) -> None:
    """Rows of 5 bytes with 3 beside them: a store of whole words would take those along."""
    whole = torch.full((2, 3, 4, 2, 8), 7.0, device=device).to(dtype)
    key = torch.ones(3, 2, 5, device=device)
    slots = torch.tensor([11, 0, 6], device=device)
    twin.reshape_and_cache(
        key, key, whole[0, ..., :5], whole[1, ..., :5], slots, 1.0, 1.0
    )
    assert bool((whole[..., 5:].float() == 7).all())
    assert int((whole[..., :5].float() == 1).sum()) == 2 * 3 * 2 * 5


@pytest.mark.parametrize("new_dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_what_is_too_large_becomes_the_largest_and_nan_stays_nan(
    dtype: torch.dtype, new_dtype: torch.dtype, twin: Twin, device: torch.device
) -> None:
    largest = torch.finfo(dtype).max
    inf = float("inf")
    numbers = [largest / 2, largest, -largest, inf, -inf, NAN, 0.0, -0.0]
    key = torch.tensor(numbers, dtype=new_dtype, device=device).view(1, 1, 8)
    cache = torch.zeros(2, 1, 1, 1, 8, device=device).to(dtype)
    slots = torch.tensor([0], device=device)
    twin.reshape_and_cache(key, key, cache[0], cache[1], slots, 1.0, 0.5)
    held = cache.cpu().float().flatten(1)
    for row, wanted in zip(held, (largest / 2, largest), strict=True):
        ends = [wanted, largest, -largest, largest, -largest]
        assert row[:5].tolist() == ends
        assert bool(row[5].isnan()) and row[6:].tolist() == [0, 0]
        assert row[6:].signbit().tolist() == [False, True]


@given(data=st.data(), plan=plans(), padding=st.integers(0, 3))
def test_eight_bits_are_gathered_as_they_are_or_times_their_scale(
    data: st.DataObject, plan: Plan, padding: int, twin: Twin, device: torch.device
) -> None:
    """What lies past the last sequence is zero, whatever NaN the cache holds."""
    stored = data.draw(st.sampled_from(FP8_DTYPES))
    wanted = data.draw(st.sampled_from([None, *DTYPES, torch.float64]))
    batch = build(plan)
    num_blocks, block_size, heads, head_size = batch.key_cache.shape
    value_size = head_size + data.draw(st.sampled_from([0, 5]))
    sizes = (num_blocks, block_size, heads)
    caches = [
        empty_cache(plan.layout, *sizes, head_size, stored, device)[0],
        empty_cache(plan.layout, *sizes, value_size, stored, device)[1],
    ]
    # a needle may lie past the largest number, which torch turns into NaN
    key_numbers, value_numbers = (
        numbers.float().clamp(-400, 400)
        for numbers in (batch.key_cache, batch.value_cache)
    )
    caches[0].copy_(key_numbers)
    caches[1][..., :head_size].copy_(value_numbers)
    caches[1][..., head_size:].copy_(key_numbers[..., : value_size - head_size] / 2)
    scales = [
        scale_of(data.draw(st.sampled_from(SCALES)), heads, plan.seed + n, device)
        for n in (0, 1)
    ]
    starts = [sum(plan.kv_lens[:req]) for req in range(len(plan.kv_lens) + 1)]
    total = starts[-1] + padding
    gathered = twin.gather_cache(
        *caches,
        batch.block_table.to(device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        total,
        *([] if wanted is None else [*scales, wanted]),
    )
    for result, cache, scale in zip(gathered, caches, scales, strict=True):
        kept = cache.cpu()
        expected = torch.zeros(total, heads, cache.shape[3]).to(stored)
        for start, kv_len, row in zip(starts, plan.kv_lens, batch.rows, strict=False):
            for position in range(kv_len):
                block_id = row[position // block_size]
                expected[start + position] = kept[block_id, position % block_size]
        if wanted is not None:
            expected = (expected.float() * on_host(scale)).to(wanted)
        assert same_bits(result, expected)


@given(write=writes(), dtype=st.sampled_from(FP8_DTYPES), seed=st.integers(0, 99))
def test_a_number_comes_back_to_half_a_step(
    write: Write, dtype: torch.dtype, seed: int, twin: Twin, device: torch.device
) -> None:
    """A scale applied once, twice or the wrong way round is off by more."""
    caches = write.caches(device, dtype)
    kinds = "one a head", "number"
    scales = [scale_of(k, write.kv_heads, seed, device) for k in kinds]
    new = write.tokens(device)
    twin.reshape_and_cache(*new, *caches, write.mapping(device), *scales)
    blocks = torch.arange(write.num_blocks, dtype=torch.int32, device=device)
    num_slots = write.num_blocks * write.block_size
    starts = torch.tensor([0, num_slots], dtype=torch.int32, device=device)
    gathered = twin.gather_cache(
        *caches, blocks[None], starts, num_slots, *scales, torch.float32
    )
    step = torch.finfo(dtype).eps / 2
    for result, tokens, scale in zip(gathered, new, scales, strict=True):
        for token, slot in enumerate(write.slots):
            if slot >= 0:
                number = tokens[token].cpu().float()
                error = (result[slot].cpu() - number).abs()
                smallest = torch.finfo(dtype).smallest_normal * on_host(scale)
                allowed = step * number.abs().maximum(smallest)
                assert bool((error <= allowed * (1 + 2**-20)).all())


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_every_argument_of_eight_bits_changes_something(
    dtype: torch.dtype, twin: Twin, device: torch.device
) -> None:
    """Each scale reaches its own half and head, and no other."""
    generator = torch.Generator().manual_seed(8)
    key, value = torch.randn(2, 6, 3, 8, generator=generator).to(device)
    slots = torch.tensor([7, 0, 2, 5, 11, 9], device=device)
    scales = {name: torch.tensor([0.03, 0.05, 0.07]) for name in ("k_scale", "v_scale")}
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 12], dtype=torch.int32, device=device)

    def write(**scales: Tensor) -> list[Tensor]:
        caches = [torch.zeros(3, 4, 3, 8, device=device).to(dtype) for _ in range(2)]
        moved = {name: scale.to(device) for name, scale in scales.items()}
        twin.reshape_and_cache(key, value, *caches, slots, **moved)
        return [cache.float().flatten(0, 1) for cache in caches]

    def read(**scales: Tensor) -> list[Tensor]:
        moved = {name: scale.to(device) for name, scale in scales.items()}
        caches = key[:3].new_ones(2, 3, 4, 3, 8).to(dtype)
        arguments = (*caches, table, starts, 12)
        return list(twin.gather_cache(*arguments, **moved, dtype=torch.float16))

    for operation in (write, read):
        before = operation(**scales)
        for half, name in enumerate(scales):
            for head in range(3):
                changed = scales[name].clone()
                changed[head] *= 1.5
                after = operation(**(scales | {name: changed}))
                other = 1 - half
                assert same_bits(after[other], before[other])
                differs = (after[half] != before[half]).any(-1).any(0).tolist()
                assert differs == [each == head for each in range(3)]


@pytest.mark.parametrize("fault", ["inverse", "swapped", "of another head", "cut off"])
def test_a_wrong_scale_is_seen(fault: str, reference: Twin) -> None:
    key, value = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(3))
    slots, dtype = torch.tensor([3, 0, 2]), torch.float8_e4m3fn
    k_scale, v_scale = torch.tensor([[0.03, 0.05], [0.02, 0.08]])
    expected = torch.zeros(2, 1, 4, 2, 8).to(dtype)
    expected[0, 0, slots] = nearest(key / k_scale[:, None], dtype)
    expected[1, 0, slots] = nearest(value / v_scale[:, None], dtype)
    wrong = {
        "inverse": (1 / k_scale, 1 / v_scale),
        "swapped": (v_scale, k_scale),
        "of another head": (k_scale.flip(0), v_scale.flip(0)),
        "cut off": (k_scale * 1.04, v_scale * 1.04),
    }
    for scales, right in (((k_scale, v_scale), True), (wrong[fault], False)):
        cache = torch.zeros(2, 1, 4, 2, 8).to(dtype)
        reference.reshape_and_cache(key, value, cache[0], cache[1], slots, *scales)
        assert same_bits(cache, expected) == right


WRITE_REFUSALS = {
    "an FP8 cache without a scale": (
        {"v_scale": None},
        ValueError,
        r"v_scale = None: expected a scale, as the cache is torch\.float8_e4m3fn",
    ),
    "a scale of nothing": (
        {"k_scale": 0.0},
        ValueError,
        r"k_scale = 0\.0: expected a finite number above 0",
    ),
    "a negative scale": ({"v_scale": -1.0}, ValueError, r"v_scale = -1\.0: expected a"),
    "a scale that is NaN": ({"k_scale": NAN}, ValueError, "k_scale = nan: expected a"),
    "an infinite scale": (
        {"v_scale": float("inf")},
        ValueError,
        "v_scale = inf: expected a finite number above 0",
    ),
    "a scale for each of other heads": (
        {"k_scale": torch.ones(3)},
        ValueError,
        r"k_scale has shape \[3\]: expected \[\] or \[1\] or \[2\]",
    ),
    "a scale of 16 bits": (
        {"k_scale": torch.ones(2).half()},
        TypeError,
        r"k_scale is torch\.float16: expected torch\.float32",
    ),
    "a scale elsewhere": (
        {"k_scale": torch.ones(2, device="meta")},
        ValueError,
        "k_scale lies on meta: expected",
    ),
}


@pytest.mark.parametrize("name", WRITE_REFUSALS)
def test_a_scale_is_refused(name: str, twin: Twin, device: torch.device) -> None:
    change, error, words = WRITE_REFUSALS[name]
    cache = torch.zeros(2, 3, 4, 2, 8, device=device).to(torch.float8_e4m3fn)
    key = torch.ones(1, 2, 8, device=device)
    scales = {"k_scale": 1.0, "v_scale": 1.0} | change
    scales = {
        name: scale.to(device) if "elsewhere" not in name and on_cpu(scale) else scale
        for name, scale in scales.items()
    }
    slots = torch.tensor([5], device=device)
    with pytest.raises(error, match=words):
        twin.raw.reshape_and_cache(key, key, cache[0], cache[1], slots, **scales)
    assert not cache.float().any()
    table = torch.tensor([[1]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 4], dtype=torch.int32, device=device)
    with pytest.raises(error, match=words):
        twin.raw.gather_cache(
            cache[0], cache[1], table, starts, 4, **scales, dtype=torch.float16
        )


def on_cpu(scale: Tensor | float | None) -> bool:
    return isinstance(scale, Tensor) and scale.device.type == "cpu"


@pytest.mark.parametrize("number", [0.0, -0.5, NAN, float("inf")])
def test_a_scale_inside_a_tensor_is_refused_where_contents_are_checked(
    number: float, twin: Twin, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGETWIN_CHECK_VALUES", "1")
    cache = torch.zeros(2, 3, 4, 2, 8, device=device).to(torch.float8_e5m2)
    key = torch.ones(1, 2, 8, device=device)
    scale = torch.tensor([0.5, number], device=device)
    with pytest.raises(
        ValueError, match=r"v_scale = .*: expected a finite number above"
    ):
        twin.reshape_and_cache(
            key, key, cache[0], cache[1], torch.tensor([5], device=device), 1.0, scale
        )
    assert not cache.float().any()


def test_numbers_of_eight_bits_are_not_divided_again(
    twin: Twin, device: torch.device
) -> None:
    cache = torch.zeros(2, 3, 4, 2, 8, device=device).to(torch.float8_e4m3fn)
    key, slots = torch.ones(1, 2, 8, device=device), torch.tensor([5], device=device)
    with pytest.raises(TypeError, match=r"value is torch\.float8_e4m3fn: .*twice"):
        twin.reshape_and_cache(
            key, key.to(cache.dtype), cache[0], cache[1], slots, 1.0, 1.0
        )
    with pytest.raises(
        TypeError, match=r"key is torch\.int32: expected torch\.float16"
    ):
        twin.raw.reshape_and_cache(key.int(), key, cache[0], cache[1], slots, 1.0, 1.0)


def test_scales_and_a_dtype_are_for_eight_bits_only(
    twin: Twin, device: torch.device
) -> None:
    cache = torch.zeros(2, 3, 4, 2, 8, device=device)
    key, slots = torch.ones(1, 2, 8, device=device), torch.tensor([5], device=device)
    with pytest.raises(
        ValueError, match=r"k_scale is given but the cache is torch\.float32"
    ):
        twin.reshape_and_cache(key, key, cache[0], cache[1], slots, k_scale=1.0)
    table = torch.tensor([[1]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 4], dtype=torch.int32, device=device)
    where = (table, starts, 4)
    with pytest.raises(
        ValueError, match=r"v_scale is given but the cache is torch\.float32"
    ):
        twin.gather_cache(cache[0], cache[1], *where, v_scale=1.0)
    with pytest.raises(
        ValueError, match="expected None, as only FP8 numbers are turned"
    ):
        twin.gather_cache(cache[0], cache[1], *where, dtype=torch.float16)
    cache = cache.to(torch.float8_e5m2)
    with pytest.raises(ValueError, match="k_scale is given but dtype = None: expected"):
        twin.gather_cache(cache[0], cache[1], *where, 1.0, 1.0)
    with pytest.raises(
        TypeError, match=r"dtype = torch\.int8: expected torch\.float16"
    ):
        twin.gather_cache(cache[0], cache[1], *where, 1.0, 1.0, torch.int8)


def test_a_value_of_another_head_size_than_its_cache_is_refused(
    twin: Twin, device: torch.device
) -> None:
    key_cache = torch.zeros(3, 4, 2, 8, device=device)
    value_cache = torch.zeros(3, 4, 2, 5, device=device)
    key, slots = torch.ones(1, 2, 8, device=device), torch.tensor([5], device=device)
    with pytest.raises(
        ValueError, match=r"value has shape \[1, 2, 8\]: expected .* 5\]"
    ):
        twin.raw.reshape_and_cache(key, key, key_cache, value_cache, slots)
    with pytest.raises(ValueError, match="alike but for the head size"):
        twin.raw.reshape_and_cache(key, key, key_cache, value_cache[:2], slots)
    with pytest.raises(ValueError, match="value_head_size = 0: expected at least 1"):
        none = value_cache[..., :0]
        twin.raw.reshape_and_cache(key, key[..., :0], key_cache, none, slots)


def test_garbage_behind_a_row_is_garbage() -> None:
    """The poison of these tests would crash or show if it were read."""
    assert all(not 0 <= block_id < 10**6 for block_id in GARBAGE)
