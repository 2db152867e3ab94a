"""How many requests fit in a KV cache: one row per mean length, computed from stated numbers.

docs/js/fit.js computes the same for the length that a slider chooses.
"""

from typing import NamedTuple

from figures.memory_use import longest_request, mean_tokens
from pagetwin.tools.replay.trace import read_trace

CACHE_BYTES = 40 * 2**30
BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2
"""Keys and values, layers, KV heads, head size and bytes per element of Llama 3 8B."""
BLOCK_SIZE = 16


class Fit(NamedTuple):
    """The cache and the requests that the table is about, in tokens."""

    slots: int
    longest: int
    mean: int


def fit() -> Fit:
    """Return the slots of the cache, and the longest and the mean request of the trace."""
    requests = read_trace("azure")
    return Fit(
        CACHE_BYTES // BYTES_PER_TOKEN,
        longest_request(requests),
        round(mean_tokens(requests)),
    )


def requests_that_fit(slots: int, tokens: int, block_size: int) -> int:
    """Return how many requests of so many tokens fit in blocks of so many slots.

    Example:
        327,680 slots in blocks of 16 are 20,480 blocks. 1,156 tokens hold 73 of them: 280 requests.
    """
    return (slots // block_size) // -(-tokens // block_size)


def fit_table() -> str:
    """Return the table as a part of the page that the slider takes over."""
    slots, longest, mean = fit()
    before = requests_that_fit(slots, longest, 1)
    lines = [
        f'<div class="fit" data-slots="{slots}" data-longest="{longest}"'
        f' data-block="{BLOCK_SIZE}" data-mean="{mean}" markdown>',
        "",
        "| tokens per request, on average | blocks | fit, reserved | fit, paged |",
        "|---:|---:|---:|---:|",
    ]
    for tokens in (longest // 16, longest // 8, mean, longest // 2, longest):
        blocks = -(-tokens // BLOCK_SIZE)
        paged = requests_that_fit(slots, tokens, BLOCK_SIZE)
        row = [f"{number:,}" for number in (tokens, blocks, before, paged)]
        if tokens == mean:
            row = [f"**{cell}**" for cell in row]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, "", "</div>"])
