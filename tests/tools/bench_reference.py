"""Attention of the benchmark's tensors by the reference, for stand-ins of other libraries."""

from typing import Any

import torch


def attend(q: Any, k: Any, v: Any, scale: float, starts: Any, **given: Any) -> Any:
    """Return output and log-sum-exp by the reference, of pages if there is a table."""
    from pagetwin.reference.attention.encoder import encoder_attention
    from pagetwin.reference.attention.paged import paged_attention

    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = torch.empty(q.shape[1], q.shape[0])
    most = int(starts.diff().max())
    more: Any = {"scale": scale, "out": out, "lse": lse, "options": given["options"]}
    if given["table"] is None:
        encoder_attention(q, k, v, starts, starts, most, most, **more)
    else:
        lens = given["lens"]
        paged_attention(
            q, k, v, given["table"], starts, lens, most, int(lens.max()), **more
        )
    return out, lse
