"""The picture of memory_use: the share of the reserved KV cache that holds tokens."""

from collections.abc import Callable

from pagetwin.tools.replay.trace import TraceRequest, read_trace

from .drawing import Drawing

BLOCK_SIZE = 16


def draw() -> Drawing:
    return _draw(760, 12, "hold tokens")


def draw_narrow() -> Drawing:
    return _draw(340, 6, "")


def _draw(width: int, margin: int, words: str) -> Drawing:
    requests = read_trace("azure")
    ways = ways_to_reserve(requests)
    shown = "; ".join(f"{way}: {_percent(share)}" for way, share in ways)
    d = Drawing(
        width,
        20 + 72 * len(ways),
        f"Share of the reserved slots that hold tokens, over all decode steps of {len(requests):,}"
        " requests of a real service (Azure LLM inference trace, 2023). Computed from the trace"
        " when this page is built.",
        f"Three bars: the share of the reserved slots of the KV cache that hold tokens. {shown}.",
    )
    full = width - 2 * margin
    for row, (way, share) in enumerate(ways):
        y = 22 + row * 72
        d.text(margin, y, way, "head")
        d.box(margin, y + 10, full, 34, "", "off")
        d.box(margin, y + 10, full * share, 34, "", "used")
        d.text(margin + 10, y + 32, f"{_percent(share)} {words}".strip(), "inverse")
        if share < 0.8:
            d.text(margin + full - 10, y + 32, "empty", "end")
    return d


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def ways_to_reserve(requests: list[TraceRequest]) -> list[tuple[str, float]]:
    """Return the ways to reserve slots, in words, and the share that each one uses."""
    longest = longest_request(requests)
    ways: tuple[tuple[str, Callable[[int, TraceRequest], int]], ...] = (
        (f"reserve {longest:,} slots for every request", lambda n, r: longest),
        (
            "reserve the final length of each request",
            lambda n, r: r.prompt_len + r.output_len,
        ),
        (
            f"add a block of {BLOCK_SIZE} slots when it is needed",
            lambda n, r: -(-n // BLOCK_SIZE) * BLOCK_SIZE,
        ),
    )
    return [(words, used_share(requests, reserve)) for words, reserve in ways]


def longest_request(requests: list[TraceRequest]) -> int:
    """Return the tokens of the longest request, prompt and answer."""
    return max(request.prompt_len + request.output_len for request in requests)


def mean_tokens(requests: list[TraceRequest]) -> float:
    """Return the tokens that a request has in the cache, averaged over all decode steps."""
    tokens = steps = 0
    for request in requests:
        lengths = range(
            request.prompt_len + 1, request.prompt_len + request.output_len + 1
        )
        tokens, steps = tokens + sum(lengths), steps + len(lengths)
    return tokens / steps


def used_share(
    requests: list[TraceRequest], reserve: Callable[[int, TraceRequest], int]
) -> float:
    """Return the tokens in the cache per reserved slot, summed over all decode steps.

    Args:
        requests: Requests of a trace.
        reserve: Takes a number of tokens and its request; returns the slots reserved for it.
    """
    used = reserved = 0
    for request in requests:
        for tokens in range(
            request.prompt_len + 1, request.prompt_len + request.output_len + 1
        ):
            used += tokens
            reserved += reserve(tokens, request)
    return used / reserved
