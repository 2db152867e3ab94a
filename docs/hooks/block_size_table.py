"""Table of block sizes: the share of reserved slots that hold tokens, computed from a trace."""

from figures.memory_use import used_share
from pagetwin.tools.replay.trace import TraceRequest, read_trace

BLOCK_SIZES = (16, 32, 64, 128, 256)


def block_size_table() -> str:
    """Return one column per block size."""
    requests = read_trace("azure")

    def share(block_size: int) -> str:
        def reserve(tokens: int, request: TraceRequest) -> int:
            return -(-tokens // block_size) * block_size

        return f"{used_share(requests, reserve):.1%}"

    return "\n".join(
        (
            f"| block size | {' | '.join(map(str, BLOCK_SIZES))} |",
            f"|---|{'---:|' * len(BLOCK_SIZES)}",
            f"| slots that hold tokens | {' | '.join(map(share, BLOCK_SIZES))} |",
        )
    )
