"""Adapter for xFormers' paged split-K decode.

The operator is written in Triton. xFormers' dispatcher requires a GPU, so the adapter calls the
operator itself. On the host it runs in Triton's interpreter, where only float32 is computed
correctly.
"""

import logging

import torch
from pagetwin.conformance import Support

# importing xFormers logs that its compiled part does not load; that part is not used here
logging.getLogger("xformers").setLevel(logging.ERROR)
try:
    from xformers.ops.fmha import Inputs, triton_splitk
    from xformers.ops.fmha.attn_bias import (
        PagedBlockDiagonalCausalWithOffsetPaddedKeysMask as Mask,
    )
except ImportError as error:
    raise ImportError(
        "this adapter needs xFormers 0.0.35 and triton older than 3.9:"
        " pip install 'pagetwin[xformers]'"
    ) from error

ON_HOST = not torch.cuda.is_available()
DTYPES = ["float32"] if ON_HOST else ["float16", "bfloat16"]
SUPPORT = Support(
    operations=["paged_attention"],
    dtypes=DTYPES,
    cache_dtypes=DTYPES,
    block_sizes=[16, 32, 64],
    head_sizes=[32, 64, 128, 256],
    query_lens=range(2),
    options=["scale", "out", "lse"],
    reads_past=["block_table"],  # rows of the table are copied below
    rejects=[],
)


def paged_attention(
    query,  # [tokens, query_heads, head_size]
    key_cache,  # [num_blocks, block_size, kv_heads, head_size]
    value_cache,
    block_table,  # [reqs, max_blocks]
    query_start_loc,  # [reqs + 1]
    seq_lens,  # [reqs]
    max_query_len,
    max_seq_len,
    scale=None,
    out=None,
    lse=None,  # [query_heads, tokens] natural
):
    """Return attention of one new token of each request over its sequence."""
    num_blocks, block_size, kv_heads, head_size = key_cache.shape
    out = torch.empty_like(query) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    # step: leave out requests without a new token
    rows = [req for req, count in enumerate(query_start_loc.diff().tolist()) if count]
    if not rows:
        return out
    lens = seq_lens[rows].tolist()
    # a part of the mask is created on the default device, whatever `device` is
    with torch.device(query.device):
        bias = Mask.from_seqlens(
            q_seqlen=[1] * len(rows),
            kv_seqlen=lens,
            page_size=block_size,
            block_tables=block_table[rows],
            device=query.device,
        )
    # step: view the cache as one sequence of slots; a group's heads share it by stride 0
    group = query.shape[1] // kv_heads
    slots = (1, num_blocks * block_size, kv_heads, 1, head_size)
    shared = (1, num_blocks * block_size, kv_heads, group, head_size)
    tokens = query_start_loc[:-1][rows].long()
    inputs = Inputs(
        query=query[tokens].view(1, len(rows), kv_heads, group, head_size),
        key=key_cache.reshape(slots).expand(shared),
        value=value_cache.reshape(slots).expand(shared),
        attn_bias=bias,
        scale=scale,
    )

    class PagedSplitK(triton_splitk.FwOp):
        # keys that are read at once; must divide the page size
        BLOCK_N = next(keys for keys in (64, 32, 16) if block_size % keys == 0)

        @classmethod
        def get_extra_args(cls, **shape):
            # the original queries the capability of the CUDA device
            if ON_HOST:
                return {"BLOCK_M": cls.BLOCK_M, "BLOCK_N": cls.BLOCK_N}
            return super().get_extra_args(**shape)

    # step: attend
    result, context = PagedSplitK.apply(inputs, needs_gradient=lse is not None)
    out[tokens] = result.reshape(len(rows), -1, head_size)
    if lse is not None:
        # [1, kv_heads, group, reqs], natural, in float64
        lse[:, tokens] = context.lse.reshape(-1, len(rows)).to(lse.dtype)
    return out
