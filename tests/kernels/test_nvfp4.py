"""The format nvfp4: swizzled scales, pages, and what is rejected."""

from typing import Any

import pytest
import torch
from pagetwin.contract.cache_formats import FORMATS, find_format
from pagetwin.contract.nvfp4_pages import split_nvfp4_page, swizzled_places
from pagetwin.contract.operations import load_implementation
from pagetwin.optimized.parallel.rank_splits import scale_as_runs
from support.twins import TWINS
from torch import Tensor

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(("block_size", "scales"), [(4, 4), (16, 8), (32, 12), (8, 16)])
def test_swizzled_scales_are_where_the_writer_for_sm_100_stores_them(
    block_size: int, scales: int
) -> None:
    places = swizzled_places(block_size, scales)
    assert places.flatten().sort().values.tolist() == [*range(block_size * scales)]
    quarter = scales // 4
    for slot in range(block_size):
        for scale in range(scales):
            row = 4 * (slot // 4) + scale // quarter
            column = 4 * (scale % quarter) + slot % 4
            assert int(places[slot, scale]) == row * scales + column


@pytest.mark.parametrize(
    ("sizes", "name"), [((6, 8), "block_size"), ((4, 6), "scales")]
)
def test_what_has_no_tiles_of_four_is_not_swizzled(
    sizes: tuple[int, int], name: str
) -> None:
    with pytest.raises(ValueError, match=f"{name} = 6: expected a multiple of 4"):
        swizzled_places(*sizes)


def test_a_page_that_does_not_hold_its_slots_is_rejected() -> None:
    page = torch.zeros(3, 2303, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"expected torch.uint8 \[num_blocks, 2304\]"):
        split_nvfp4_page(page, 16, 2, 64)
    with pytest.raises(ValueError, match=r"head_size = 40 .* multiple of 16"):
        split_nvfp4_page(page, 16, 2, 40)
    with pytest.raises(ValueError, match=r"strides \[1, 3\]: expected 1 for its bytes"):
        split_nvfp4_page(torch.zeros(2304, 3, dtype=torch.uint8).T, 16, 2, 64)


def cache_of(head_size: int) -> list[Tensor]:
    """Return the codes of two blocks of four slots and two heads, and their block scales."""
    codes = torch.zeros(2, 2, 4, 2, head_size // 2, dtype=torch.uint8)
    scales = torch.zeros(2, 2, 4, 2, max(1, head_size // 16)).to(E4M3)
    return [*codes.unbind(), *scales.unbind()]


FACTORS = {"k_global_scale": 0.5, "v_global_scale": 0.25}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "bytes for scales": (
        {"k_scale": torch.zeros(2, 4, 2, 2, dtype=torch.uint8)},
        "k_scale is torch.uint8: expected torch.float8_e4m3fn",
    ),
    "a scale per head": (
        {"v_scale": torch.zeros(2, 4, 2, 1).to(E4M3)},
        r"v_scale has shape \[2, 4, 2, 1\]: expected float8_e4m3fn scales \[2, 4, 2, 2\]",
    ),
    "no scales of the values": (
        {"v_scale": None},
        r"v_scale = None: expected float8_e4m3fn scales \[2, 4, 2, 2\]",
    ),
    "no scales": (
        {"k_scale": None, "v_scale": None},
        r"k_scale = None: .* kv_heads\] for int4_per_token_head or .* / 16\] for nvfp4",
    ),
    "the name of int4": (
        {"kv_cache_dtype": "int4_per_token_head_vllm"},
        "but the cache is torch.uint8 with the scales of the format 'nvfp4'",
    ),
    "no global scale": (
        {"k_global_scale": None},
        "k_global_scale = None: expected a number, which block scales are multiplied by",
    ),
    "a global scale of 0": (
        {"v_global_scale": 0.0},
        "v_global_scale = 0.0: expected a finite number above 0",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("name", TWINS)
def test_an_error_names_the_wrong_argument_of_a_write(name: str, what: str) -> None:
    changes, words = WRONG[what]
    key_cache, value_cache, k_scale, v_scale = cache_of(32)
    given = {"k_scale": k_scale, "v_scale": v_scale} | FACTORS | changes
    new, slots = torch.ones(1, 2, 32), torch.tensor([3])
    with pytest.raises((ValueError, TypeError), match=words):
        load_implementation(name).reshape_and_cache(
            new, new, key_cache, value_cache, slots, **given
        )
    assert not key_cache.any()


@pytest.mark.parametrize("name", TWINS)
def test_a_head_that_is_not_cut_into_blocks_has_no_block_scales(name: str) -> None:
    key_cache, value_cache, k_scale, v_scale = cache_of(24)
    new, slots = torch.ones(1, 2, 24), torch.tensor([3])
    with pytest.raises(
        ValueError, match="the head size is 24: expected a multiple of 16"
    ):
        load_implementation(name).reshape_and_cache(
            new, new, key_cache, value_cache, slots, k_scale, v_scale, **FACTORS
        )


@pytest.mark.parametrize("name", TWINS)
def test_a_global_scale_of_an_fp8_cache_is_rejected(name: str) -> None:
    cache = torch.zeros(2, 4, 2, 16).to(E4M3)
    new, slots = torch.ones(1, 2, 16), torch.tensor([3])
    with pytest.raises(ValueError, match=r"k_global_scale is given .* format fp8_e4m3"):
        load_implementation(name).reshape_and_cache(
            new, new, cache, cache.clone(), slots, 0.5, 0.5, k_global_scale=0.5
        )


def test_the_axes_of_scales_tell_formats_of_bytes_apart() -> None:
    slots, blocks = torch.zeros(2, 4, 2), torch.zeros(2, 4, 2, 1).to(E4M3)
    assert find_format(torch.uint8, slots).name == "int4_per_token_head"
    assert find_format(torch.uint8, blocks).name == "nvfp4"
    over = find_format(torch.uint8, blocks, "nvfp4_4over6")
    assert over is FORMATS["nvfp4_4over6"]


def test_scales_with_other_distances_of_blocks_are_not_cut_into_runs() -> None:
    """Codes in pages of vLLM are farther apart, counted in slots, than contiguous scales."""
    pages = torch.zeros(3, 2304, dtype=torch.uint8)
    key_cache, _, k_scale, _ = split_nvfp4_page(pages, 16, 2, 64)
    with pytest.raises(ValueError, match=r"k_scale has strides .*: expected 36 slots"):
        scale_as_runs("k_scale", k_scale, key_cache, 2)
    packed = torch.zeros(3, 16, 2, 32, dtype=torch.uint8)
    scales = torch.zeros(3, 16, 2, 4).to(E4M3)
    found = scale_as_runs("k_scale", scales, packed, 2)
    assert isinstance(found, Tensor)
    assert found.shape == (24, 2, 2, 4) and found.data_ptr() == scales.data_ptr()


@pytest.mark.parametrize("name", TWINS)
def test_a_block_is_moved_with_its_codes_and_its_block_scales(name: str) -> None:
    """Codes and scales of a layer are two tensors, which are copied and swapped one by one."""
    twin = load_implementation(name)
    codes = torch.zeros(2, 3, 4, 2, 16, dtype=torch.uint8)
    scales = torch.zeros(2, 3, 4, 2, 2).to(E4M3)
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 4, 2, 32, generator=generator).unbind()
    twin.reshape_and_cache(key, value, *codes, torch.arange(4), *scales, **FACTORS)
    pairs = torch.tensor([[0, 2]])
    other = torch.zeros_like(codes), torch.zeros_like(scales)
    for tensor, on_host in zip((codes, scales), other, strict=True):
        twin.copy_blocks([tensor], pairs)
        twin.swap_blocks(tensor, on_host, torch.tensor([[2, 1]]))
    starts = torch.tensor([0, 4], dtype=torch.int32)
    found = [
        twin.gather_cache(
            *cache, torch.tensor([[block]], dtype=torch.int32), starts, 4, *of_cache,
            dtype=torch.float32, **FACTORS,
        )
        for cache, of_cache, block in (
            (codes, scales, 0), (codes, scales, 2), (*other, 1),
        )
    ]  # fmt: skip
    # half the distance of codes is a sixth of the largest size, and a scale is rounded
    assert float((found[0][0] - key).abs().max()) < float(key.abs().max()) / 5
    for half in (0, 1):
        assert torch.equal(found[1][half], found[0][half])
        assert torch.equal(found[2][half], found[0][half])
