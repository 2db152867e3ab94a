"""Pages of the format nvfp4: the codes and block scales of keys and values in one block of memory.

The bytes of a page are, in this order, the codes of all keys, their block scales, the codes of all
values and their block scales. vLLM's FlashInfer backend stores them so. A *head slot* holds the
keys or the values of one head: the codes of all slots of a block, and then their block scales.
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
    alternates: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return views of the keys, the values and their block scales in pages.

    Args:
        page: [num_blocks, bytes] uint8. Blocks may have any distance.
        block_size: Slots of a block.
        kv_heads: Heads of keys and values.
        head_size: Channels of a key.
        value_head_size: Optional. Channels of a value. If None, as many as of a key.
        by_head: Whether the slots of a head are stored together (HND), or the heads of a slot.
        alternates: Whether a page is head slots of keys and values in turn, as those of MiniMax-M3
            are. Keys and values then have one size, and `by_head` is not used.

    Returns:
        key_cache, value_cache, k_scale, v_scale, as `reshape_and_cache` takes them: [num_blocks,
        block_size, kv_heads, head_size / 2] uint8, and [..., head_size / 16] float8_e4m3fn.

    Raises:
        ValueError: A page has fewer bytes, a head size is not a multiple of 16, or the values of
            head slots have another size than the keys.

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
    if alternates:
        if value_head_size != head_size:
            raise ValueError(
                f"value_head_size = {value_head_size} in head slots: expected head_size ="
                f" {head_size}, as head slots have one size"
            )
        slots = page[:, :expected].view(len(page), 2 * kv_heads, block_size, -1)
        return split_head_slots(slots[:, ::2], slots[:, 1::2], head_size)
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
    return key, value, NVFP4.view_scales(k_scale), NVFP4.view_scales(v_scale)


def split_nvfp4_cache(
    kv_cache: Tensor, head_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return views of keys, values and their block scales in one layer's cache of vLLM.

    A block whose bytes are contiguous is a page of `split_nvfp4_page`. If the heads are outside of
    the blocks or of the layers (LHBNC, BHLNC), each has head slots.

    Args:
        kv_cache: uint8 with any distance of its blocks. [num_blocks, 2 * kv_heads, block_size,
            bytes], a head slot per key head and then per value head; [num_blocks, kv_heads,
            block_size, bytes of key and value] for values of another size; or [num_blocks, 2,
            block_size, kv_heads, bytes], as in vLLM 0.25.
        head_size: Channels of a key.

    Returns:
        key_cache, value_cache, k_scale, v_scale, as `reshape_and_cache` takes them.

    Raises:
        ValueError: The cache is not uint8, has none of these shapes, or gaps between its bytes.

    Example:
        2 heads of 64 in blocks of 16: [100, 4, 16, 36].

        >>> parts = split_nvfp4_cache(torch.zeros(100, 4, 16, 36, dtype=torch.uint8), 64)
        >>> [list(part.shape) for part in parts[1:3]]
        [[100, 16, 2, 32], [100, 16, 2, 4]]
    """
    check_positive(head_size=head_size)
    if kv_cache.dtype != torch.uint8:
        raise ValueError(
            f"kv_cache is {kv_cache.dtype}: expected torch.uint8, the bytes of codes and of block"
            " scales"
        )
    shape, width = list(kv_cache.shape), NVFP4.row_bytes(head_size)
    value_size, per_scale = head_size, NVFP4.row_bytes(NVFP4.channels_per_scale)
    if kv_cache.dim() == 5 and shape[1] == 2 and shape[4] == width:
        heads, slots = 3, 2
    elif kv_cache.dim() == 4 and shape[3] == width and shape[1] % 2 == 0:
        heads, slots = 1, 2
    elif (
        kv_cache.dim() == 4 and shape[3] > width and (shape[3] - width) % per_scale == 0
    ):
        heads, slots = 1, 2
        value_size = (shape[3] - width) // per_scale * NVFP4.channels_per_scale
    else:
        raise ValueError(
            f"kv_cache has shape {shape}: expected [num_blocks, 2 * kv_heads, block_size, {width}],"
            f" or [num_blocks, 2, block_size, kv_heads, {width}], codes and block scales of"
            f" {head_size} channels"
        )
    strides = kv_cache.stride()
    if _is_contiguous_in_blocks(kv_cache):
        size = kv_cache[:1].numel()
        page = kv_cache.as_strided((shape[0], size), (strides[0], 1))
        kv_heads = size // shape[slots] // (width + NVFP4.row_bytes(value_size))
        by_head = strides[heads] > strides[slots]
        return split_nvfp4_page(
            page, shape[slots], kv_heads, head_size, value_size, by_head
        )
    if kv_cache.dim() != 4 or value_size != head_size or strides[2:] != (width, 1):
        raise ValueError(
            f"kv_cache has shape {shape} and strides {list(strides)}: expected blocks, or head"
            " slots, without gaps between their bytes"
        )
    middle = shape[1] // 2
    return split_head_slots(kv_cache[:, :middle], kv_cache[:, middle:], head_size)


def split_head_slots(
    keys: Tensor, values: Tensor, head_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return views of the codes and block scales in head slots.

    Args:
        keys, values: [num_blocks, kv_heads, block_size, bytes] uint8, contiguous but for the first
            two axes.
        head_size: Channels of a key, and of a value.

    Returns:
        key_cache, value_cache, k_scale, v_scale, as `reshape_and_cache` takes them.
    """
    parts = []
    for slots in (keys, values):
        blocks, heads, block_size, _ = slots.shape
        start = slots.storage_offset()
        for width in (NVFP4.elements(head_size), NVFP4.scale_bytes(head_size)):
            shape = (blocks, block_size, heads, width)
            strides = (slots.stride(0), width, slots.stride(1), 1)
            parts.append(slots.as_strided(shape, strides, start))
            start += block_size * width
    key, k_scale, value, v_scale = parts
    return key, value, NVFP4.view_scales(k_scale), NVFP4.view_scales(v_scale)


def _is_contiguous_in_blocks(kv_cache: Tensor) -> bool:
    """Return whether the bytes of a block are contiguous, in any order of its axes."""
    step = 1
    axes = zip(kv_cache.stride()[1:], kv_cache.shape[1:], strict=True)
    for stride, size in sorted(axes):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


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
