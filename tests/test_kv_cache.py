"""Is the cache made of the bytes that its spec says?"""

from itertools import product
from math import prod

import pytest
import torch
from conftest import TWINS, Twin
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.conformance.oracles.dense import same_bits
from pagetwin.contract.kinds import FP8_DTYPES, cache_dtype_of
from pagetwin.contract.layouts import KVCacheLayout
from pagetwin.contract.specs import KVCacheSpec, MLAAttentionSpec

specs = st.builds(
    KVCacheSpec,
    block_size=st.sampled_from([1, 3, 16, 24]),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    head_size=st.sampled_from([1, 8, 24]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, *FP8_DTYPES]),
)


@given(spec=specs, num_blocks=st.integers(0, 4))
def test_a_cache_is_a_view_of_its_bytes(
    spec: KVCacheSpec, num_blocks: int, twin: Twin, device: torch.device
) -> None:
    raw = twin.allocate_kv_cache(spec, num_blocks, device)
    assert raw.dtype == torch.int8 and raw.device.type == device.type
    assert raw.numel() == num_blocks * spec.page_size_bytes
    assert not raw.any()
    cache = twin.reshape_kv_cache(raw, spec)
    shape = (2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
    assert tuple(cache.shape) == shape and cache.dtype == spec.dtype
    assert shape == twin.get_kv_cache_shape(*shape[1:])
    assert cache.is_contiguous() and cache.data_ptr() == raw.data_ptr()
    key_cache, value_cache = twin.split_kv_cache(cache)
    assert tuple(key_cache.shape) == tuple(value_cache.shape) == shape[1:]
    if not num_blocks:
        return
    key_cache.fill_(1)
    numbers = cache.float()
    assert bool((numbers[0] == 1).all()) and not numbers[1].any()
    value_cache.fill_(2)
    last = raw.view(spec.dtype)[-key_cache.numel() :].float()
    assert bool((last == 2).all())


@given(spec=specs)
def test_a_page_counts_keys_and_values(spec: KVCacheSpec) -> None:
    elements = torch.empty(2, spec.block_size, spec.num_kv_heads, spec.head_size)
    assert spec.page_size_bytes == elements.to(spec.dtype).nbytes


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_eight_bits_are_half_the_bytes_of_sixteen(
    dtype: torch.dtype, twin: Twin
) -> None:
    """And the same bytes hold twice the blocks."""
    half, whole = (KVCacheSpec(16, 2, 8, each) for each in (dtype, torch.float16))
    assert 2 * half.page_size_bytes == whole.page_size_bytes == 1024
    raw = twin.allocate_kv_cache(whole, 3)
    assert twin.reshape_kv_cache(raw, half).shape[1] == 6


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("auto", torch.bfloat16),
        ("fp8", torch.float8_e4m3fn),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
    ],
)
def test_a_cache_dtype_has_the_name_that_vllm_gives_it(
    name: str, dtype: torch.dtype
) -> None:
    assert cache_dtype_of(name, torch.bfloat16) == dtype


@pytest.mark.parametrize("name", ["fp4", "", "FP8", "float8_e4m3fn"])
def test_an_unknown_cache_dtype_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"{name!r}: expected auto, fp8, fp8_e4m3, fp8_e"
    ):
        cache_dtype_of(name, torch.bfloat16)


def test_part_of_a_page_is_refused(twin: Twin) -> None:
    spec = KVCacheSpec(16, 2, 8, torch.float16)
    raw = torch.zeros(spec.page_size_bytes + 2, dtype=torch.int8)
    with pytest.raises(
        ValueError, match="raw has 1026 bytes: expected a multiple of 1024"
    ):
        twin.reshape_kv_cache(raw, spec)


@pytest.mark.parametrize("field", ["block_size", "num_kv_heads", "head_size"])
def test_a_spec_without_elements_is_refused(field: str) -> None:
    numbers = {"block_size": 16, "num_kv_heads": 2, "head_size": 8} | {field: 0}
    with pytest.raises(ValueError, match=f"{field} = 0: expected at least 1"):
        KVCacheSpec(**numbers)


def test_a_negative_number_of_blocks_is_refused(twin: Twin) -> None:
    with pytest.raises(ValueError, match="num_blocks = -1: expected at least 0"):
        twin.allocate_kv_cache(KVCacheSpec(16, 2, 8), -1)
    with pytest.raises(ValueError, match="num_blocks = -1: expected at least 0"):
        twin.get_kv_cache_shape(-1, 16, 2, 8)


# ---- orders of the axes in memory


def place_in_memory(
    shape: tuple[int, ...], stride_order: tuple[int, ...], index: tuple[int, ...]
) -> int:
    """Return how many elements lie before an index: count the axes from the outermost."""
    place = 0
    for axis in stride_order:
        place = place * shape[axis] + index[axis]
    return place


@given(data=st.data())
def test_an_element_lies_where_the_order_of_the_axes_says(
    data: st.DataObject, twin: Twin
) -> None:
    """Write through the view, read the raw bytes; permutations of any cycle length."""
    num_axes = data.draw(st.integers(1, 5))
    axes = st.integers(1, 4)
    shape = tuple(data.draw(st.lists(axes, min_size=num_axes, max_size=num_axes)))
    order = tuple(data.draw(st.permutations(range(num_axes))))
    dtype = data.draw(st.sampled_from([torch.int8, torch.int16, torch.float32]))
    raw = torch.zeros(prod(shape) * dtype.itemsize, dtype=torch.int8)
    view = twin.view_kv_cache(raw, dtype, shape, order)
    assert tuple(view.shape) == shape
    for number, index in enumerate(product(*map(range, shape))):
        view[index] = number % 100
    elements = raw.view(dtype).tolist()
    for number, index in enumerate(product(*map(range, shape))):
        assert elements[place_in_memory(shape, order, index)] == number % 100


def test_a_cycle_of_three_axes_is_not_its_own_inverse(twin: Twin) -> None:
    """(1, 2, 0) undone by itself would give (2, 0, 1)."""
    raw = torch.arange(24, dtype=torch.int8)
    view = twin.view_kv_cache(raw, torch.int8, (2, 3, 4), (1, 2, 0))
    assert view.stride() == (1, 8, 2)
    assert view[1, 2, 3].item() == 2 * 8 + 3 * 2 + 1


@given(data=st.data())
def test_both_twins_see_bytes_alike_even_if_there_are_none(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5)))
    order = data.draw(st.permutations(range(len(shape))))
    start = data.draw(st.integers(0, 3))
    raw = torch.zeros(2 * (prod(shape) + start), dtype=torch.int8)[2 * start :]
    views = [
        each.view_kv_cache(raw, torch.float16, shape, order) for each in TWINS.values()
    ]
    assert views[0].shape == views[1].shape == shape
    assert views[0].stride() == views[1].stride()
    assert views[0].storage_offset() == views[1].storage_offset() == start


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (0, 1, 3), (1, 2, 3)])
def test_an_order_that_misses_an_axis_is_refused(
    order: tuple[int, ...], twin: Twin
) -> None:
    raw = torch.zeros(24, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"expected every axis from 0 to 2 once"):
        twin.view_kv_cache(raw, torch.int8, (2, 3, 4), order)


def test_a_shape_of_other_bytes_is_refused(twin: Twin) -> None:
    raw = torch.zeros(24, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"\(2, 3\) of torch.float16 has 12 bytes"):
        twin.view_kv_cache(raw, torch.float16, (2, 3), (0, 1))


def test_a_latent_page_is_not_seen_as_keys_and_values(twin: Twin) -> None:
    spec = MLAAttentionSpec(16, 1, 576, torch.float16)
    raw = twin.allocate_kv_cache(spec, 2)
    with pytest.raises(ValueError, match="does the backend's cache hold what"):
        twin.reshape_kv_cache(raw, spec)


def test_what_is_no_bytes_is_refused(twin: Twin) -> None:
    raw = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"raw is torch\.uint8: expected torch\.int8"):
        twin.raw.reshape_kv_cache(raw, KVCacheSpec(16, 2, 8, torch.float16))


# ---- one allocation for all layers


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_a_layout_puts_every_element_where_its_name_says(
    layout: KVCacheLayout, twin: Twin
) -> None:
    layers, blocks, heads, slots, size = 2, 3, 2, 4, 5
    spec = KVCacheSpec(slots, heads, size, torch.int16)
    raw = torch.zeros(layers * blocks * spec.page_size_bytes, dtype=torch.int8)
    caches = twin.raw.reshape_layered_kv_cache(raw, spec, layers, layout)
    assert tuple(caches.shape) == (layers, 2, blocks, slots, heads, size)
    truth = torch.arange(caches.numel(), dtype=torch.int16).view(caches.shape)
    caches.copy_(truth)
    lengths = {"L": layers, "B": blocks, "H": heads, "N": slots, "C": 2 * size}
    elements = raw.view(torch.int16)
    for layer, half, block, slot, head, at in product(*map(range, caches.shape)):
        place = 0
        where = {"L": layer, "B": block, "H": head, "N": slot, "C": half * size + at}
        for axis in layout.name:
            place = place * lengths[axis] + where[axis]
        assert elements[place] == truth[layer, half, block, slot, head, at]


@given(data=st.data())
def test_every_layout_serves_reads_and_writes_alike(
    data: st.DataObject, twin: Twin, device: torch.device
) -> None:
    """A cache of any layout goes into the write and comes out of the gather."""
    layout = data.draw(st.sampled_from(KVCacheLayout))
    dtype = data.draw(st.sampled_from([torch.float32, *FP8_DTYPES]))
    scales = (0.5, 0.25) if dtype in FP8_DTYPES else ()
    spec = KVCacheSpec(4, 2, 8, dtype)
    raw = torch.zeros(2 * 3 * spec.page_size_bytes, dtype=torch.int8, device=device)
    caches = twin.reshape_layered_kv_cache(raw, spec, 2, layout)
    key, value = torch.randn(2, 5, 2, 8, device=device)
    slots = torch.tensor([8, 9, 10, 11, 4], device=device)
    key_cache, value_cache = twin.split_kv_cache(caches[1])
    twin.reshape_and_cache(key, value, key_cache, value_cache, slots, *scales)
    table = torch.tensor([[2, 1]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 5], dtype=torch.int32, device=device)
    keys, values = twin.gather_cache(key_cache, value_cache, table, starts, 5)
    if scales:
        key, value = key * 2, value * 4
    assert same_bits(keys, key.to(dtype)) and same_bits(values, value.to(dtype))
    assert not caches[0].float().any()


def test_part_of_a_page_of_all_layers_is_refused(twin: Twin) -> None:
    spec = KVCacheSpec(16, 2, 8, torch.float16)
    raw = torch.zeros(3 * spec.page_size_bytes, dtype=torch.int8)
    with pytest.raises(ValueError, match="expected a multiple of 2048"):
        twin.reshape_layered_kv_cache(raw, spec, 2, KVCacheLayout.NHD)
    with pytest.raises(ValueError, match="num_layers = 0"):
        twin.reshape_layered_kv_cache(raw, spec, 0, KVCacheLayout.NHD)


# ---- the form of the first kernels


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, *FP8_DTYPES])
def test_a_packed_cache_holds_parts_of_sixteen_bytes(
    dtype: torch.dtype, twin: Twin
) -> None:
    blocks, slots, heads, size = 2, 3, 2, 16
    part = 16 // dtype.itemsize
    shape = twin.get_packed_kv_cache_shape(blocks, slots, heads, size)
    assert shape == (2, blocks, slots * heads * size)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    cache = torch.arange(prod(shape)).to(integer).view(shape)
    halves = twin.split_packed_kv_cache(cache.view(dtype), heads, size)
    key_cache, value_cache = (half.view(integer) for half in halves)
    for block, head, at, slot in product(
        range(blocks), range(heads), range(size), range(slots)
    ):
        inside = (head * size + at // part * part) * slots + slot * part + at % part
        assert (
            key_cache[block, head, at // part, slot, at % part]
            == (cache[0, block, inside])
        )
        inside = (head * size + at) * slots + slot
        assert value_cache[block, head, at, slot] == cache[1, block, inside]


def test_heads_that_do_not_fill_the_parts_are_refused(twin: Twin) -> None:
    cache = torch.zeros(2, 2, 24, dtype=torch.float16)
    with pytest.raises(ValueError, match="head_size = 12: expected a multiple of 8"):
        twin.split_packed_kv_cache(cache, 2, 12)
    with pytest.raises(ValueError, match=r"kv_cache has shape \[2, 2, 24\]"):
        twin.split_packed_kv_cache(cache, 2, 8)
