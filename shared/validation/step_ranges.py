"""Validation of the ranges of a step that are computed on its device."""

import torch
from torch import Tensor

from .batch import check_start_loc
from .memory import check_own_memory
from .primitives import check_dtype, check_length, check_same_device


def check_rswa_query_ranges(
    out: Tensor,
    rswa_prefix_lens: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    contents: bool = True,
) -> None:
    """Raise an error for tensors that are not of one step, and rows that are too few for it.

    Args:
        out, rswa_prefix_lens, query_start_loc, seq_lens: as in `fill_rswa_query_ranges`.
        contents: whether lengths are read, which waits for their device.
    """
    given = {
        "out": out,
        "rswa_prefix_lens": rswa_prefix_lens,
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
    }
    check_same_device(**given)
    for name, tensor in given.items():
        check_dtype(name, tensor, torch.int32)
    if out.dim() != 2 or out.shape[1] != 2:
        raise ValueError(f"out has shape {list(out.shape)}: expected [rows, 2]")
    check_own_memory(out=out)
    reqs = len(seq_lens)
    check_length("rswa_prefix_lens", rswa_prefix_lens, reqs, "requests")
    check_start_loc("query_start_loc", query_start_loc, reqs, out.shape[0], contents)
    if not contents:
        return
    lens = zip(
        query_start_loc.diff().tolist(),
        seq_lens.tolist(),
        rswa_prefix_lens.tolist(),
        strict=True,
    )
    for req, (query_len, seq_len, prefix_len) in enumerate(lens):
        if prefix_len < 0:
            raise ValueError(
                f"rswa_prefix_lens[{req}] = {prefix_len}: expected 0 or more tokens"
            )
        if query_len > seq_len:
            raise ValueError(
                f"request {req} has {query_len} new tokens but seq_lens[{req}] ="
                f" {seq_len}: expected the new tokens to be part of the sequence"
            )
