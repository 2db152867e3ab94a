"""The picture of memory_use: the share of the reserved KV cache that holds tokens."""

from collections.abc import Callable

from pagetwin.tools.replay.trace import TraceRequest, read_trace

from .drawing import Drawing

BLOCK_SIZE = 16


def draw() -> Drawing:
    requests = read_trace("azure")
    d = _drawing(760, 172, requests)
    d.text(20, 24, "reserved per request", "note")
    d.text(290, 24, "used", "note")
    for row, (words, share) in enumerate(_shares(requests)):
        y = 36 + row * 44
        d.text(20, y + 21, words, "label")
        _bar(d, 290, y, 400, share)
    return d


def draw_narrow() -> Drawing:
    requests = read_trace("azure")
    d = _drawing(340, 214, requests)
    d.text(10, 20, "used, of what is reserved per request:", "note")
    for row, (words, share) in enumerate(_shares(requests)):
        y = 50 + row * 58
        d.text(10, y - 6, words, "label")
        _bar(d, 10, y, 264, share)
    return d


def _drawing(width: int, height: int, requests: list[TraceRequest]) -> Drawing:
    return Drawing(
        width,
        height,
        f"Share of the reserved memory that holds keys and values, over all decode steps of"
        f" {len(requests):,} requests of a real chat service (Azure LLM inference trace, 2023)."
        f" Computed from the trace when this page is built.",
    )


def _shares(requests: list[TraceRequest]) -> list[tuple[str, float]]:
    """Return the ways to reserve memory, in words, and the share that each one uses."""
    longest = max(request.prompt_len + request.output_len for request in requests)
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
    return [(words, used_share(requests, reserve)) for words, reserve in ways]


def _bar(d: Drawing, x: float, y: float, width: float, share: float) -> None:
    d.box(x, y, width, 30, "", "off")
    d.box(x, y, width * share, 30, "", "a")
    d.text(x + width + 12, y + 21, f"{share:.1%}", "label")


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
