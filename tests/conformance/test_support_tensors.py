"""Declared support: dtypes, strides and layouts of tensors, and numbers."""

import torch
from pagetwin.conformance import Support
from pagetwin.conformance.base.support import (
    _has_strides,
    bounds_of,
    converted,
    has_same_caches,
    layouts_of,
    nearest_length,
)
from support_layouts import CACHE, QUERY, strided
from torch import Tensor


def test_a_tensor_is_converted_to_a_dtype_that_holds_it() -> None:
    ones, tenths = torch.ones(2), torch.full((2,), 0.1)
    assert converted(ones, ["float16", "float32"]) is ones
    found = converted(ones, ["float16"])
    assert found is not None and found.dtype == torch.float16
    assert converted(tenths, ["float16"]) is None
    double = converted(tenths, ["float16", "float64"])
    assert double is not None and double.dtype == torch.float64
    meta = torch.ones(2, device="meta")
    assert converted(meta, ["float16"]) is meta


def test_layouts_and_strides_of_a_cache() -> None:
    turned = torch.zeros(5, 2, 16, 8).transpose(1, 2)
    assert (layouts_of(CACHE), layouts_of(turned)) == (["NHD"], ["HND"])
    assert layouts_of(CACHE[:, :, :1]) == layouts_of(CACHE[:, :1]) == ["NHD", "HND"]
    equal = torch.zeros(99).as_strided((1, 2, 2, 8), (32, 8, 8, 1))
    assert layouts_of(equal) == ["NHD", "HND"]
    cases: dict[str | None, tuple[list[Tensor], list[Tensor]]] = {
        None: ([CACHE[..., ::2]], []),
        "packed": (
            [CACHE, turned, QUERY],
            [CACHE[:, :, :1], QUERY.transpose(0, 1), QUERY.transpose(1, 2)],
        ),
        "packed heads": (
            [QUERY, strided(64, 8, 1), QUERY[:0]],
            [QUERY[..., ::2], QUERY[:, ::2]],
        ),
        "rows": (
            [QUERY[:, ::2], turned, torch.zeros(()), QUERY[..., ::8]],
            [QUERY[..., ::2]],
        ),
    }
    for needed, (right, wrong) in cases.items():
        assert all(_has_strides(tensor, needed) for tensor in right), needed
        assert not any(_has_strides(tensor, needed) for tensor in wrong), needed


def test_caches_have_the_same_strides_if_a_pair_has_both() -> None:
    both = ("query", "key_cache", "value_cache")
    assert has_same_caches(Support(same_strides=[both]))
    assert not has_same_caches(Support(same_strides=[both[:2], both[::2]]))


def test_bounds_and_the_nearest_length() -> None:
    assert bounds_of(range(8, 0, -2)) == bounds_of([4, 2, 8]) == (2, 8)
    assert bounds_of(range(2, 9)) == (2, 8)
    for lengths in ([8, 2, 4], range(8, 1, -2)):
        found = [nearest_length(length, lengths) for length in (1, 2, 3, 5, 9)]
        assert found == [2, 2, 2, 4, 8]
    assert nearest_length(7, None) == 7 == nearest_length(7, [9, 7])
