"""Pages of the format nvfp4: the codes and block scales of keys and values in one block of memory.

The bytes of a page are, in this order, the codes of all keys, their block scales, the codes of all
values and their block scales. vLLM's FlashInfer backend stores them so.
"""

import torch
from torch import Tensor

from .cache_formats import FORMATS
from .checks import check_positive

NVFP4 = FORMATS["nvfp4"]


def split_nvfp4_page(
    page: Tensor,
    block_size: int,
    kv_heads: int,
    head_size: int,
    value_head_size: int | None = None,
    by_head: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return views of the keys, the values and their block scales in pages.

    Args:
        page: [num_blocks, bytes] uint8. Blocks may have any distance.
        block_size: Slots of a block.
        kv_heads: Heads of keys and values.
        head_size: Channels of a key.
        value_head_size: Optional. Channels of a value. If None, as many as of a key.
        by_head: Whether the slots of a head are stored together (HND), or the heads of a slot.

    Returns:
        key_cache, value_cache, k_scale, v_scale, as `reshape_and_cache` takes them: [num_blocks,
        block_size, kv_heads, head_size / 2] uint8, and [..., head_size / 16] float8_e4m3fn.

    Raises:
        ValueError: A page has fewer bytes, or a head size is not a multiple of 16.

    Source:
        vLLM 0.33, `_nvfp4_kv_views` of the FlashInfer backend.

    Example:
        16 slots of 2 heads of 64: 1,024 bytes of codes of the keys, 128 of their scales, and the
        same for the values.

        >>> key, value, k_scale, v_scale = split_nvfp4_page(
        ...     torch.zeros(3, 2304, dtype=torch.uint8), block_size=16, kv_heads=2, head_size=64
        ... )
        >>> k_scale.storage_offset(), value.storage_offset(), v_scale.storage_offset()
        (1024, 1152, 2176)
    """
    value_head_size = head_size if value_head_size is None else value_head_size
    expected = NVFP4.page_bytes(
        block_size, kv_heads, head_size, value_head_size, torch.uint8
    )
    if page.dim() != 2 or page.dtype != torch.uint8 or page.shape[1] < expected:
        raise ValueError(
            f"page is {page.dtype} and has shape {list(page.shape)}: expected torch.uint8"
            f" [num_blocks, {expected}] for {block_size} slots of {kv_heads} heads"
        )
    if page.shape[1] > 1 and page.stride(1) != 1:
        raise ValueError(
            f"page has strides {list(page.stride())}: expected 1 for its bytes"
        )
    parts, start = [], page.storage_offset()
    for size in (head_size, value_head_size):
        for width in (NVFP4.elements(size), NVFP4.scale_bytes(size)):
            slot, head = (width, block_size * width)
            if not by_head:
                slot, head = (kv_heads * width, width)
            shape = (len(page), block_size, kv_heads, width)
            parts.append(page.as_strided(shape, (page.stride(0), slot, head, 1), start))
            start += block_size * kv_heads * width
    key, k_scale, value, v_scale = parts
    scale_dtype = torch.float8_e4m3fn
    return key, value, k_scale.view(scale_dtype), v_scale.view(scale_dtype)


def swizzled_places(block_size: int, scales: int) -> Tensor:
    """Return where kernels for sm_100 store the block scales of values.

    Those of a head are a matrix with a row per slot. In tiles of four slots, a quarter of the
    scales of the four slots is a row, and the scales of one index of the four slots are neighbours.
    Scales of keys, and those of values for sm_120, are stored by slot.

    Args:
        block_size: Slots of a block, a multiple of 4.
        scales: Scales of a value, a multiple of 4.

    Returns:
        [block_size, scales] int64 the index in the swizzled matrix of each scale by slot, so
        `swizzled.flatten()[swizzled_places(*swizzled.shape)]` is by slot.

    Raises:
        ValueError: One of them is not a multiple of 4.

    Source:
        vLLM's `reshape_and_cache_flash` for sm_100.

    Example:
        8 scales of 4 slots. The scales 0 and 1 of the slots are row 0, the scales 2 and 3 row 1.

        >>> swizzled_places(4, 8)[:, :4].tolist()
        [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    """
    check_positive(block_size=block_size, scales=scales)
    for name, number in (("block_size", block_size), ("scales", scales)):
        if number % 4:
            raise ValueError(
                f"{name} = {number}: expected a multiple of 4, as scales are swizzled in tiles of"
                " four slots and in quarters of the scales"
            )
    slot = torch.arange(block_size)[:, None]
    scale = torch.arange(scales)[None, :]
    row = slot // 4 * 4 + scale // (scales // 4)
    column = scale % (scales // 4) * 4 + slot % 4
    return row * scales + column
