"""Adapter for FlashMLA's sparse prefill: attention over selected latents in bfloat16.

Calls the operator `sparse_prefill_fwd` of vLLM's `_flashmla_C.abi3.so`, which needs nothing else of
vLLM. The variable PAGETWIN_FLASHMLA names the file. The kernel takes 8, 16, 32, 64 or 128 heads:
missing ones are 0. It takes a multiple of 128 slots per query: missing ones are -1.
"""

import os
from pathlib import Path

import torch
from pagetwin.conformance import Support

FILE = os.environ.get("PAGETWIN_FLASHMLA", "")
if not Path(FILE).is_file():
    raise ImportError(
        "this adapter needs FlashMLA and a GPU of compute capability 9: set PAGETWIN_FLASHMLA to"
        " the path of vLLM's _flashmla_C.abi3.so"
    )
torch.ops.load_library(FILE)
ATTEND = torch.ops._flashmla_C.sparse_prefill_fwd
HEADS = (8, 16, 32, 64, 128)
MULTIPLE = 128
"""Slots of a query come in so many; -1 is none."""
SUPPORT = Support(
    operations=["sparse_attention"],
    devices=["sm_90"],
    dtypes=["bfloat16"],
    cache_dtypes=["bfloat16"],
    head_sizes=[576],
    group_sizes=range(1, 129),
    options={
        "scale": None,
        "out": None,
        "lse": None,
        "sinks": None,
        "value_head_size": [512],
    },
    rejects=[],
)


def sparse_attention(
    query,  # [tokens, query_heads, 576]
    key_cache,  # [num_blocks, block_size, 1, 576]
    value_cache,  # [num_blocks, block_size, 1, 512], the first elements of the keys
    slots,  # [tokens, selected]
    scale=None,
    out=None,  # [tokens, query_heads, 512]
    lse=None,  # [query_heads, tokens] natural
    sinks=None,  # [query_heads]
):
    """Return attention of each token over the latents of its slots."""
    tokens, heads, width = query.shape
    rank = value_cache.shape[3]
    out = query.new_empty(tokens, heads, rank) if out is None else out
    scale = width**-0.5 if scale is None else scale
    if not tokens:
        return out

    # step: pad heads and slots to numbers that the kernel takes
    more = next(count for count in HEADS if count >= heads) - heads
    padded = torch.nn.functional.pad(query, (0, 0, 0, more)).contiguous()
    columns = -slots.shape[1] % MULTIPLE or (0 if slots.shape[1] else MULTIPLE)
    indices = torch.nn.functional.pad(slots, (0, columns), value=-1)[:, None]
    sink = sinks
    if sinks is not None:
        sink = torch.nn.functional.pad(sinks.float(), (0, more), value=-torch.inf)

    # step: attend
    latents = key_cache.flatten(0, 1).contiguous()
    found, _, natural = ATTEND(
        padded, latents, indices.contiguous(), float(scale), rank, sink, None, None
    )

    # step: leave out queries without a slot
    has_keys = (slots >= 0).any(1)
    out.copy_(found[:, :heads].where(has_keys[:, None, None], 0))
    if lse is not None:
        natural = natural[:, :heads].where(has_keys[:, None], -torch.inf)
        if sinks is not None:
            # the kernel's log-sum-exp does not contain the sink
            natural = torch.logaddexp(natural, sinks.float())
        lse.copy_(natural.T)
    return out
