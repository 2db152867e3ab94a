"""Errors about pages and scales of cache formats: one sentence that says what would fit."""

from typing import Any

import pytest
import torch
from pagetwin.contract.cache_formats import FORMATS, split_page
from pagetwin.contract.nvfp4_pages import split_nvfp4_cache, split_nvfp4_page
from pagetwin.contract.operations import load_implementation
from pagetwin.contract.specs import CacheConfig
from pagetwin.engine.layer import Attention
from pagetwin.validation.library_formats import read_cache_format
from support.twins import TWINS

INT8 = FORMATS["int8_per_token_head"]
PAGES: dict[str, tuple[tuple[Any, ...], str]] = {
    "scales that are given": (
        (torch.zeros(2, 4, 2, 64, dtype=torch.uint8), 32, 32, FORMATS["fp8_e4m3"]),
        "form is fp8_e4m3: expected a format whose scales the write measures,.* int8_per",
    ),
    "no codes": (
        (torch.zeros(2, 4, 2, 64, dtype=torch.uint8), 32, 32, FORMATS["auto"]),
        "form is auto: expected a format whose scales the write measures",
    ),
    "numbers": (
        (torch.zeros(2, 4, 2, 72), 32, 32, INT8),
        r"page is torch.float32 .* expected torch.uint8 or torch.int8 \[num_blocks,",
    ),
    "three axes": (
        (torch.zeros(2, 4, 72, dtype=torch.uint8), 32, 32, INT8),
        r"page .* has shape \[2, 4, 72\]: expected .*kv_heads, 72\]",
    ),
    "a byte too many": (
        (torch.zeros(2, 4, 2, 73, dtype=torch.uint8), 32, 32, INT8),
        r"page .* has shape \[2, 4, 2, 73\]: expected .*kv_heads, 72\]",
    ),
    "a negative head size": (
        (torch.zeros(2, 4, 2, 72, dtype=torch.uint8), -8, 32, INT8),
        "head_size = -8: expected at least 1",
    ),
    "values of no size": (
        (torch.zeros(2, 4, 2, 72, dtype=torch.uint8), 32, 0, INT8),
        "value_head_size = 0: expected at least 1",
    ),
}


@pytest.mark.parametrize("what", PAGES)
def test_a_page_that_does_not_fit_is_rejected(what: str) -> None:
    given, words = PAGES[what]
    with pytest.raises(ValueError, match=words):
        split_page(*given)


def test_a_cache_of_nvfp4_is_named_by_its_argument() -> None:
    with pytest.raises(
        ValueError, match=r"kv_cache is torch.int8: expected torch.uint8"
    ):
        split_nvfp4_cache(torch.zeros(2, 4, 16, 36, dtype=torch.int8), 64)
    with pytest.raises(ValueError, match="head_size = -16: expected at least 1"):
        split_nvfp4_cache(torch.zeros(2, 4, 16, 36, dtype=torch.uint8), -16)
    with pytest.raises(ValueError, match=r"page is torch.int8"):
        split_nvfp4_page(torch.zeros(3, 2304, dtype=torch.int8), 16, 2, 64)


@pytest.mark.parametrize("name", TWINS)
def test_scales_out_of_range_or_missing_are_explained(name: str) -> None:
    write = load_implementation(name).reshape_and_cache
    caches = torch.zeros(2, 2, 4, 1, 8).to(torch.float8_e4m3fn)
    new, slots = torch.ones(1, 1, 8), torch.tensor([0])
    with pytest.raises(
        ValueError, match=r"expected a finite number above 0, from 1.18e-38 to 3.4e.38"
    ):
        write(new, new, *caches, slots, 1e-38, 1.0)
    with pytest.raises(
        ValueError, match=r"k_scale = None: .* kv_heads\] .* for fp8_per_token_head"
    ):
        write(new, new, *caches, slots)
    wide = torch.zeros(2, 2, 4, 1, 8).to(torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"takes its numbers as they are$"):
        write(new, new, *wide, slots)


def test_scales_of_a_layer_that_are_text_are_rejected() -> None:
    for name in ("fp8", "int8_per_token_head"):
        layer = Attention(
            4,
            32,
            1.0,
            2,
            cache_config=CacheConfig(cache_dtype=name),
            attn_backend="REFERENCE",
        )
        with pytest.raises(
            TypeError, match="v_scale = 'x': expected a number or a ten"
        ):
            layer.load_kv_scales(1.0, "x")  # type: ignore[arg-type]
        assert float(layer._k_scale) == 1.0


def test_all_names_of_formats_are_in_the_error() -> None:
    with pytest.raises(ValueError, match=r"expected one of auto, .*, fp8, fp8_inc$"):
        read_cache_format("int4")


@pytest.mark.parametrize("name", TWINS)
def test_copies_take_scales_in_tensors_of_their_own(name: str) -> None:
    twin = load_implementation(name)
    scales = torch.arange(24.0).view(2, 3, 2, 2)
    twin.copy_blocks([scales.unsqueeze(-1)], torch.tensor([[2, 0]]))
    assert torch.equal(scales[:, 0], scales[:, 2])
    assert scales[:, 1].flatten().tolist() == [
        4.0,
        5.0,
        6.0,
        7.0,
        16.0,
        17.0,
        18.0,
        19.0,
    ]
    blocks = torch.arange(24.0).view(2, 3, 2, 1, 2).to(torch.float8_e4m3fn)
    there = torch.zeros_like(blocks)
    twin.swap_blocks(blocks, there, torch.tensor([[2, 0]]))
    assert torch.equal(there[:, 0].float(), blocks[:, 2].float())
    assert not there[:, 1:].float().any()
