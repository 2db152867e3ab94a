"""What estimates of costs know of a layer and of a batch."""

from dataclasses import dataclass
from typing import NamedTuple

from ...contract.cache_formats import CODES_PER_ELEMENT, head_size_of
from .attention_call import AttentionCall
from .chip import count_processors


@dataclass(frozen=True)
class Layer:
    """What the estimates need to know of all calls with one signature.

    Args:
        group_size, kv_heads: query heads per kv head, and kv heads.
        numbers: elements of a key and a value of one head.
        key_bytes: bytes of a key and a value of one head.
        causal: whether queries attend to no later keys.
        max_visible_keys: Optional. Keys that a row attends to, at most. If None, all of them.
        processors: multiprocessors of the chip.
    """

    group_size: int
    kv_heads: int
    numbers: int
    key_bytes: int
    causal: bool
    max_visible_keys: int | None
    processors: int


class BatchBounds(NamedTuple):
    """What the host knows of a batch. The lengths of its requests are on the device.

    Args:
        num_reqs, tokens: requests, and new tokens of all of them.
        max_query_len, max_key_len: upper bounds over the requests.
    """

    num_reqs: int
    tokens: int
    max_query_len: int
    max_key_len: int

    @property
    def num_long(self) -> int:
        """Requests as long as the longest one, if the others have one token.

        Example:
            4 requests of 9 tokens, at most 3 each: 2 * 3 + 2 * 1 is 8, so the third is assumed
            long.
        """
        spare = self.tokens - self.num_reqs
        long = -(-spare // max(1, self.max_query_len - 1))
        return max(1, min(self.num_reqs, long))

    @property
    def is_ragged(self) -> bool:
        """Whether requests have different numbers of new tokens."""
        return self.tokens < self.num_reqs * self.max_query_len


def describe_layer(call: AttentionCall) -> Layer:
    """Return what the estimates need to know of all calls with this call's signature."""
    options, value = call.options, call.value
    kv_heads, value_size = value.shape[-2], head_size_of(value)
    numbers = call.query.shape[-1] + value_size
    visible = None
    if options.tree_mask is None and options.query_ranges is None:
        sides = 1 if options.causal is True else 2
        window, chunk = options.sliding_window, options.attention_chunk_size
        limits = [*([sides * window] if window else []), *([chunk] if chunk else [])]
        visible = min(limits, default=None)
    return Layer(
        group_size=call.query.shape[1] // kv_heads,
        kv_heads=kv_heads,
        numbers=numbers,
        key_bytes=(
            numbers
            * call.key.dtype.itemsize
            // CODES_PER_ELEMENT.get(call.key.dtype, 1)
        ),
        causal=options.causal is True,
        max_visible_keys=visible,
        processors=count_processors(call.query.device),
    )


def visible_keys(layer: Layer, batch: BatchBounds) -> int:
    """Return the keys that the rows of one request attend to, at most."""
    if layer.max_visible_keys is None:
        return batch.max_key_len
    return min(batch.max_key_len, layer.max_visible_keys + batch.max_query_len)
