"""Chunked attention: a query attends to the keys of its own chunk of positions."""

import triton
import triton.language as tl


@triton.jit
def limit_to_chunk(begin, end, position, CHUNK_SIZE: tl.constexpr):
    """Return the visible range, limited to the chunk that contains `position`."""
    chunk_begin = position // CHUNK_SIZE * CHUNK_SIZE
    begin = tl.maximum(begin, chunk_begin)
    end = tl.minimum(end, chunk_begin + CHUNK_SIZE)
    return begin, end
