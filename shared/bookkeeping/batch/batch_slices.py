"""The start locations of a range of requests."""

from ...contract.shapes import CountsBuffer, StartLoc
from ...validation.step import check_request_slice


def slice_query_start_locs(
    query_start_loc: StartLoc, request_slice: slice
) -> CountsBuffer:
    """Return the starts of some requests, relative to the first one.

    Args:
        query_start_loc: [reqs + 1] start of each request's new tokens.
        request_slice: the requests. A stop past the last one is the end.

    Returns:
        [requests of the slice + 1] int32, a new tensor that begins with 0.

    Raises:
        ValueError: a slice without start or stop, or one that starts after the end.

    Source:
        vLLM's function of that name.

    Example:
        >>> slice_query_start_locs(
        ...     torch.tensor([0, 3, 7, 12], dtype=torch.int32), slice(1, 3)
        ... )
        tensor([0, 4, 9], dtype=torch.int32)
    """
    check_request_slice(query_start_loc, request_slice)
    # step: slice the starts and the last end
    starts = query_start_loc[request_slice.start : request_slice.stop + 1]
    # step: subtract the first start
    return starts - starts[0]
