"""The request of a token, found by bisection in the start locations of a batch."""

import triton
import triton.language as tl


@triton.jit
def find_request(start_loc, token, num_reqs, num_halvings):
    """Return the request of each token; num_reqs for tokens past the last request.

    `start_loc`: [num_reqs + 1] rising starts. `num_halvings`: bits of num_reqs.
    """
    # the number of requests that end at or before the token, by bisection
    low = tl.zeros_like(token)
    high = low + num_reqs
    for _ in range(num_halvings):
        middle = (low + high) // 2
        search = low < high
        end = tl.load(start_loc + middle + 1, mask=search, other=0)
        ended = search & (end <= token)
        low = tl.where(ended, middle + 1, low)
        high = tl.where(search & (end > token), middle, high)
    return low
