"""Is the cache made of the bytes that its spec says?"""

import pytest
import torch
from conftest import Twin
from hypothesis import given
from hypothesis import strategies as st
from pagetwin.shared.specs import KVCacheSpec

specs = st.builds(
    KVCacheSpec,
    block_size=st.sampled_from([1, 3, 16, 24]),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    head_size=st.sampled_from([1, 8, 24]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
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
    assert bool((cache[0] == 1).all()) and not cache[1].any()
    value_cache.fill_(2)
    assert bool((raw.view(spec.dtype)[-key_cache.numel() :] == 2).all())


@given(spec=specs)
def test_a_page_counts_keys_and_values(spec: KVCacheSpec) -> None:
    elements = torch.empty(2, spec.block_size, spec.num_kv_heads, spec.head_size)
    assert spec.page_size_bytes == elements.to(spec.dtype).nbytes


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
