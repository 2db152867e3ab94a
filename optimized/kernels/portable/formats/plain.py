"""Plain cache: numbers are stored as they are."""

import triton
import triton.language as tl


@triton.jit
def upcast(numbers, config: tl.constexpr):
    """Return numbers of a KV tile, in float32 if the arithmetic is (interpreter only)."""
    if config.UPCAST:
        numbers = numbers.to(tl.float32)
    return numbers
