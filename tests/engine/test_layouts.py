"""Layouts: the order of a cache in memory, and which one is taken."""

from itertools import permutations

import pytest
import torch
from pagetwin.contract.layouts import (
    DEFAULT_PREFERENCE,
    KVCacheLayout,
    get_flashinfer_layout_string,
    get_kv_cache_layout,
    get_supported_kv_cache_layouts,
    is_valid_kv_cache_layout,
    layout_from_name,
)

pytestmark = pytest.mark.quick

L, B, H, N, C = 2, 3, 4, 5, 6
VARIABLE = "PAGETWIN_KV_CACHE_LAYOUT"


def laid_out(layout: KVCacheLayout) -> torch.Tensor:
    """Return numbered elements [L, B, H, N, C] in memory in the order of the name."""
    sizes = {"L": L, "B": B, "H": H, "N": N, "C": C}
    in_memory = torch.arange(L * B * H * N * C).view([sizes[x] for x in layout.name])
    return in_memory.permute([layout.name.index(axis) for axis in "LBHNC"])


def is_one_piece(part: torch.Tensor) -> bool:
    return int(part.max() - part.min()) == part.numel() - 1


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_what_a_layout_says_of_itself_is_so_in_memory(layout: KVCacheLayout) -> None:
    logical = laid_out(layout)
    assert layout.is_layer_compact == is_one_piece(logical[1])
    assert layout.is_block_compact == is_one_piece(logical[1, 1])
    assert layout.is_block_outermost == is_one_piece(logical[:, 1])
    assert layout.is_block_contiguous == logical[1, 1].is_contiguous()
    assert layout.slots_before_heads == (logical.stride(3) > logical.stride(2))
    strides = logical.stride()
    by_stride = sorted(range(5), key=lambda axis: -strides[axis])
    assert layout.stride_order == tuple(by_stride)
    one_layer = sorted(range(4), key=lambda axis: -strides[axis + 1])
    assert layout.layer_view_order == tuple(one_layer)


def test_the_older_names_mean_layouts_of_one_layer() -> None:
    assert layout_from_name("NHD") is KVCacheLayout.LBNHC
    assert layout_from_name("HND") is KVCacheLayout.LBHNC
    assert len(KVCacheLayout) == 6 == len(DEFAULT_PREFERENCE)


def test_an_unknown_layout_is_rejected_with_what_there_is() -> None:
    assert not is_valid_kv_cache_layout("NDH")
    with pytest.raises(ValueError, match=r"'NDH': expected one of LBHNC, .*HND, NHD"):
        layout_from_name("NDH")


def test_the_argument_beats_the_environment_and_that_the_connector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert get_kv_cache_layout() is KVCacheLayout.NHD
    assert get_kv_cache_layout(connector_layout="HND") is KVCacheLayout.HND
    monkeypatch.setenv(VARIABLE, "BLNHC")
    assert get_kv_cache_layout(connector_layout="HND") is KVCacheLayout.BLNHC
    assert get_kv_cache_layout("NHD") is KVCacheLayout.NHD
    assert get_kv_cache_layout(KVCacheLayout.HND) is KVCacheLayout.HND


def test_a_later_choice_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM remembers its first answer: a choice made after it has no effect."""
    for name in ("NHD", "HND", "NHD"):
        monkeypatch.setenv(VARIABLE, name)
        assert get_kv_cache_layout() is KVCacheLayout[name]


def test_a_wrong_word_in_the_environment_is_rejected_with_its_origin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "nhd")
    with pytest.raises(ValueError, match=f"variable {VARIABLE}: .*'nhd'"):
        get_kv_cache_layout()
    with pytest.raises(ValueError, match=r"override: .*'XYZ'"):
        get_kv_cache_layout("XYZ")


def test_backends_that_agree_keep_their_order() -> None:
    one = [KVCacheLayout.BHLNC, KVCacheLayout.LBNHC]
    assert get_supported_kv_cache_layouts([one, None, tuple(one)]) == one
    assert get_supported_kv_cache_layouts([None]) == list(DEFAULT_PREFERENCE)


def test_backends_that_differ_get_what_most_of_them_put_first() -> None:
    l_nhd, l_hnd, blnhc = (
        KVCacheLayout.LBNHC,
        KVCacheLayout.LBHNC,
        KVCacheLayout.BLNHC,
    )
    lists = [[l_nhd, l_hnd], [l_hnd, l_nhd, blnhc], [l_nhd, blnhc, l_hnd]]
    for permutation in permutations(lists):
        assert get_supported_kv_cache_layouts(permutation) == [l_nhd, l_hnd]
    with pytest.raises(ValueError, match="no common layout: LBNHC; LBHNC"):
        get_supported_kv_cache_layouts([[l_nhd], [l_hnd]])


def test_flashinfer_has_no_name_for_heads_outside_blocks() -> None:
    assert get_flashinfer_layout_string(KVCacheLayout.BLNHC) == "NHD"
    assert get_flashinfer_layout_string(KVCacheLayout.BHLNC) == "HND"
    with pytest.raises(ValueError, match="LHBNC"):
        get_flashinfer_layout_string(KVCacheLayout.LHBNC)
