"""Adapter for torch's variable-length attention, `torch.nn.attention.varlen.varlen_attn`.

It attends to ragged keys, so it is an encoder attention. What it takes differs between versions of
torch: the options are those of its signature.
"""

import inspect

import torch
from pagetwin.conformance import Support
from torch.nn.attention.varlen import AuxRequest, varlen_attn

TAKEN = set(inspect.signature(varlen_attn).parameters)
SUPPORT = Support(
    operations=["encoder_attention"],
    devices=["cuda"],
    dtypes=["float16", "bfloat16"],
    head_sizes=[32, 64, 96, 128, 256],
    group_sizes=None if "enable_gqa" in TAKEN else [1],
    options={"out": None, "lse": None, "causal": "bool"}
    | ({"scale": None} if "scale" in TAKEN else {}),
    rejects=[],
)


def encoder_attention(
    query,  # [tokens, query_heads, head_size]
    key,  # [keys, kv_heads, head_size]
    value,
    query_start_loc,  # [reqs + 1]
    key_start_loc,  # [reqs + 1]
    max_query_len,
    max_key_len,
    scale=None,
    out=None,
    lse=None,  # [query_heads, tokens] natural
    causal=False,
):
    """Return attention of each request's queries over its keys."""
    out = torch.empty_like(query) if out is None else out
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    tokens, keys = int(query_start_loc[-1]), int(key_start_loc[-1])
    if not tokens or not keys:
        return out
    given = {"scale": scale} if "scale" in TAKEN else {}
    if "enable_gqa" in TAKEN:
        given["enable_gqa"] = query.shape[1] != key.shape[1]
    if causal:
        # the last query of a request is at its last key
        given |= (
            {"window_size": (-1, 0)} if "window_size" in TAKEN else {"is_causal": True}
        )

    # step: attend
    result, natural = varlen_attn(
        query[:tokens].contiguous(),
        key[:keys].contiguous(),
        value[:keys].contiguous(),
        query_start_loc,
        key_start_loc,
        max_query_len,
        max_key_len,
        return_aux=AuxRequest(lse=True),
        **given,
    )
    out[:tokens] = result
    if lse is not None:
        # [query_heads, tokens]; without keys it is infinite
        lse[:, :tokens] = torch.where(natural.isinf(), -torch.inf, natural)
    return out
