"""One scale per token and head: that of a key multiplies its scores, that of a value its weights.

So the codes of a tile are converted and not multiplied.
"""

import triton
import triton.language as tl

SMALLEST_SCALE = tl.constexpr(1e-6)
"""The scale of a row of zeros."""
LIFT = tl.constexpr(64.0)
"""Factor of the weights, which the results are divided by.

Values of float16 have scales from 1e-6 to 516. A weight of 1 times such a scale is below the
smallest normal float16, 6.1e-5. Times 64 it is a normal one, and the largest is below 65,504."""


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
def scale_slot_weights(p, v_scale):
    """Return weights with the scale of each value, times LIFT: [BLOCK_M, BLOCK_N]."""
    return p * (v_scale * LIFT)[None, :]


@triton.jit
def scale_slot_values(result):
    """Return rows without the factor of the weights: [BLOCK_M, BLOCK_DV]."""
    return result * (1.0 / LIFT)
