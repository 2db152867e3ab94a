"""The picture of memory_use: the share of the reserved KV cache that holds tokens."""

from collections.abc import Callable

from pagetwin.tools.replay.trace import TraceRequest, read_trace

from .drawing import Drawing

BLOCK_SIZE = 16
WIDTH, LEFT = 400, 290


def draw() -> Drawing:
    requests = read_trace("azure")
    longest = max(each.prompt_len + each.output_len for each in requests)
    ways: tuple[tuple[str, Callable[[int, TraceRequest], int]], ...] = (
        (f"the longest request ({longest:,} tokens) each", lambda n, r: longest),
        (
            "the final length, if it were known",
            lambda n, r: r.prompt_len + r.output_len,
        ),
        (
            f"blocks of {BLOCK_SIZE} tokens, as they are needed",
            lambda n, r: -(-n // BLOCK_SIZE) * BLOCK_SIZE,
        ),
    )
    d = Drawing(
        760,
        172,
        f"Share of the reserved memory that holds keys and values, over all decode steps of"
        f" {len(requests):,} requests of a real chat service (Azure LLM inference trace, 2023)."
        f" Computed from the trace when this page is built.",
    )
    d.text(20, 24, "reserved per request", "note")
    d.text(LEFT, 24, "used", "note")
    for row, (words, reserve) in enumerate(ways):
        y = 36 + row * 44
        share = used_share(requests, reserve)
        d.text(20, y + 21, words, "label")
        d.box(LEFT, y, WIDTH, 30, "", "off")
        d.box(LEFT, y, WIDTH * share, 30, "", "a")
        d.text(LEFT + WIDTH + 12, y + 21, f"{share:.1%}", "label")
    return d


def used_share(
    requests: list[TraceRequest], reserve: Callable[[int, TraceRequest], int]
) -> float:
    """Return the tokens in the cache per reserved token, summed over all decode steps.

    Args:
        requests: Requests of a trace.
        reserve: Takes a number of tokens and its request; returns the tokens reserved for it.
    """
    used = reserved = 0
    for request in requests:
        for tokens in range(
            request.prompt_len + 1, request.prompt_len + request.output_len + 1
        ):
            used += tokens
            reserved += reserve(tokens, request)
    return used / reserved
