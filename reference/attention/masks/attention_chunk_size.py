"""Chunked attention: a query attends to the keys in its own chunk of positions.

Source: Llama 4, 2025 (its layers with local attention).
"""

from torch import Tensor

from ..requests.request import RequestView


def visible(attention_chunk_size: int, request: RequestView) -> Tensor:
    """Return [queries, keys]: both positions have the same quotient by the chunk size."""
    query_chunk = request.query_position // attention_chunk_size
    key_chunk = request.key_position // attention_chunk_size
    return key_chunk[None, :] == query_chunk[:, None]
