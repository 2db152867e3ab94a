"""Requests of a batch: which rows are theirs, and the positions of their queries and keys."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ....contract.attention_options import AttentionOptions
from .batch_invariance import one_request_per_query
from .request import Request


def split_requests(
    query_start_loc: Tensor, key_lens: Tensor, options: AttentionOptions
) -> Iterator[Request]:
    """Yield the requests of a batch.

    The queries are the last tokens of their sequence: query j of q has position
    key_len - q + j. In a tree a token's position is one past that of its parent.

    Args:
        query_start_loc: [reqs + 1], where each request's queries start.
        key_lens: [reqs], keys of each request.
        options: Those of the call. If `batch_invariant` is set, each query is a request of its
            own.
    """
    starts = query_start_loc.tolist()
    for index, key_len in enumerate(key_lens.tolist()):
        rows = slice(starts[index], starts[index + 1])
        query_len = rows.stop - rows.start
        context_len = key_len - query_len
        keys = torch.arange(key_len, device=key_lens.device)
        query_position = torch.arange(context_len, key_len, device=keys.device)
        key_position, tree = keys, None
        if options.tree_mask is not None and query_len <= options.tree_mask.shape[1]:
            tree = options.tree_mask[index, :query_len, :query_len]
            # the depth of a token is the number of its ancestors
            query_position = context_len + tree.sum(1) - 1
            key_position = torch.cat([keys[:context_len], query_position])
        request = Request(index, rows, keys, query_position, key_position, tree)
        if options.batch_invariant:
            yield from one_request_per_query(request, options)
        else:
            yield request
