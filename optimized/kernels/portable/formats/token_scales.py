"""One scale per token and head: that of a key multiplies its scores, that of a value its weights.

So the codes of a tile are converted and not multiplied.
"""

import triton
import triton.language as tl

SMALLEST_SCALE = tl.constexpr(1e-6)
"""The scale of a row of zeros."""


@triton.jit
def measure(numbers, LARGEST: tl.constexpr):
    """Return rows divided by their scale, which makes the largest size LARGEST; and the scale.

    NaN does not count for the scale. It stays NaN, and infinity times the inverse of an infinite
    scale is NaN too.

    Args:
        numbers: [ROWS, ELEMENTS] float32. Elements past the end of a row are 0.

    Returns:
        [ROWS, ELEMENTS] float32, [ROWS] float32.
    """
    size = tl.where(numbers == numbers, tl.abs(numbers), 0.0)
    scale = tl.maximum(tl.div_rn(tl.max(size, 1), LARGEST), SMALLEST_SCALE)
    return numbers * tl.div_rn(1.0, scale)[:, None], scale


@triton.jit
def load_slot_scales(
    scale, strides, kv_head, block_id, slot, is_key, MASKED: tl.constexpr
):
    """Return the scales of slots: [BLOCK_N].

    Masked ones may be NaN, and 0 * NaN = NaN, so they are loaded as 0.

    Args:
        scale, strides: [num_blocks, block_size, kv_heads], and its SlotStrides.
        block_id, slot, is_key: [BLOCK_N].
    """
    places = scale + kv_head.to(tl.int64) * strides.head
    places += block_id * strides.block + slot * strides.slot
    return tl.load(places, mask=is_key, other=0.0) if MASKED else tl.load(places)


@triton.jit
def divide_weights(p):
    """Return weights with the scales of values divided by the largest of their row, and that one.

    Scales are of any size. In float16 a product with a small one is subnormal, and with a large one
    infinite.

    Args:
        p: [BLOCK_M, BLOCK_N] float32.

    Returns:
        [BLOCK_M, BLOCK_N], [BLOCK_M].
    """
    largest = tl.max(p, 1)
    # a row of zeros, and one with an infinite scale, stay as they are
    is_number = (largest > 1e-30) & (largest < float("inf"))
    largest = tl.where(is_number, largest, 1.0)
    return p * tl.div_rn(1.0, largest)[:, None], largest
