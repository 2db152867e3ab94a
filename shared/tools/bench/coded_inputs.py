"""Caches of formats that measure a scale per token and head, for workloads of the benchmark."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...contract.cache_formats import CacheFormat, find_format, split_page
from ...reference.cache.formats import FILES


class Coded(NamedTuple):
    """A cache of codes and scales.

    Args:
        key, value: [num_blocks, block_size, kv_heads, elements].
        k_scale, v_scale: [num_blocks, block_size, kv_heads].
    """

    key: Tensor
    value: Tensor
    k_scale: Tensor
    v_scale: Tensor


def empty_coded(
    form: CacheFormat,
    slots: tuple[int, int, int],
    sizes: tuple[int, int],
    in_page: bool,
    device: torch.device | str,
) -> Coded:
    """Return a cache of zeros.

    Args:
        slots: num_blocks, block_size, kv_heads.
        sizes: Elements of a key and of a value.
        in_page: Whether codes and scales share pages, as in vLLM. If not, each has a tensor of its
            own.
    """
    assert form.dtype is not None
    stored = [form.elements(size) for size in sizes]
    if in_page:
        page = torch.zeros(*slots, sum(stored) + 8, dtype=torch.uint8, device=device)
        return Coded(*split_page(page, *sizes, form))
    codes = [
        torch.zeros(*slots, elements, dtype=torch.uint8, device=device).view(form.dtype)
        for elements in stored
    ]
    scales = [torch.zeros(slots, device=device) for _ in range(2)]
    return Coded(codes[0], codes[1], scales[0], scales[1])


def encode(form: CacheFormat, numbers: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Store numbers by the reference, block by block: a few hundred MB at a time.

    Args:
        numbers: [num_blocks, block_size, kv_heads, elements] in the dtype of keys and values.
        codes, scale: Modified in place.
    """
    assert form.dtype is not None
    step = max(1, (1 << 26) // numbers[0].numel())
    for begin in range(0, len(numbers), step):
        part = slice(begin, begin + step)
        made, measured = FILES[form.file].store(numbers[part], scale[part], form.dtype)
        as_bytes(codes)[part] = as_bytes(made)
        scale[part] = measured


def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what codes and scales mean, by the reference.

    Args:
        codes: [..., block_size, kv_heads, elements].
        scale: [..., block_size, kv_heads].
    """
    form = find_format(codes.dtype, scale)
    numbers: Tensor = FILES[form.file].load(codes, scale, torch.float32)
    return numbers.to(dtype)


def as_bytes(codes: Tensor) -> Tensor:
    """Return codes as bytes, because torch does not index FP8 tensors everywhere."""
    return codes.view(torch.uint8)
