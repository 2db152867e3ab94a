"""Micro-batches: one step cut into slices of its requests and tokens.

One expression clips all requests. Tensors on the device are clipped there, with both ends of the
slice as plain numbers, so nothing is copied to the device and nothing is read from it.
"""

from collections.abc import Sequence

from torch import Tensor

from ...contract.argument_types import typed
from ...contract.metadata_classes import (
    CommonAttentionMetadata,
    UBatchSlice,
    cut_fields,
)
from ...reference.batch.batch_slices import (
    slice_query_start_locs as slice_query_start_locs,
)
from ...validation.step import check_micro_batch


@typed
def make_metadata_with_slice(
    ubatch_slice: UBatchSlice, attn_metadata: CommonAttentionMetadata
) -> CommonAttentionMetadata:
    """Return one micro-batch of a step as a step of its own.

    Raises:
        NotImplementedError: `logits_indices_padded` is not on the host. Counting those of a
            micro-batch would synchronize with the device.
    """
    check_micro_batch(ubatch_slice, attn_metadata)
    requests, tokens = ubatch_slice.request_slice, ubatch_slice.token_slice
    # step: slice the fields that have an entry per request or token
    changes = cut_fields(attn_metadata, requests, tokens)
    # step: clip each request to the token slice
    rows = slice(requests.start, requests.stop + 1)
    starts = attn_metadata.query_start_loc_cpu[rows]
    starts_on_device = attn_metadata.query_start_loc[rows]
    query_start_loc_cpu = _clipped(starts, tokens)
    cut_off = _tokens_after(starts, tokens)
    # step: shorten requests cut at the end, advance requests cut at the front
    changes["seq_lens"] = changes["seq_lens"] - _tokens_after(starts_on_device, tokens)
    changes["seq_lens_cpu"] = changes["seq_lens_cpu"] - cut_off
    skipped = (tokens.start - starts[:-1]).clamp(min=0)
    changes["num_computed_tokens_cpu"] = changes["num_computed_tokens_cpu"] + skipped
    # step: select the tokens whose logits are wanted
    changes |= _own_logits(attn_metadata, tokens)
    return attn_metadata.replace(
        **changes,
        query_start_loc=_clipped(starts_on_device, tokens),
        query_start_loc_cpu=query_start_loc_cpu,
        num_reqs=requests.stop - requests.start,
        num_actual_tokens=min(tokens.stop, attn_metadata.num_actual_tokens)
        - tokens.start,
        max_query_len=int(query_start_loc_cpu.diff().max()),
        max_seq_len=int(changes["seq_lens_cpu"].max()),
    )


@typed
def split_attn_metadata(
    ubatch_slices: Sequence[UBatchSlice],
    common_attn_metadata: CommonAttentionMetadata,
) -> list[CommonAttentionMetadata]:
    """Return every micro-batch of a step as a step of its own."""
    return [
        make_metadata_with_slice(ubatch_slice, common_attn_metadata)
        for ubatch_slice in ubatch_slices
    ]


def _clipped(starts: Tensor, tokens: slice) -> Tensor:
    return starts.clamp(tokens.start, tokens.stop) - tokens.start


def _tokens_after(starts: Tensor, tokens: slice) -> Tensor:
    """Return the number of tokens of each request after the slice."""
    return (starts[1:] - tokens.stop).clamp(min=0)


def _own_logits(
    attn_metadata: CommonAttentionMetadata, tokens: slice
) -> dict[str, Tensor | int]:
    wanted = attn_metadata.logits_indices_padded
    if wanted is None:
        return {}
    if wanted.device.type != "cpu":
        raise NotImplementedError(
            f"logits_indices_padded is on {wanted.device}: expected the host, as counting"
            " those of a micro-batch would synchronize with the device; set it after the"
            " batch is sliced"
        )
    wanted = wanted[: attn_metadata.num_logits_indices]
    own = wanted[(wanted >= tokens.start) & (wanted < tokens.stop)] - tokens.start
    return {"logits_indices_padded": own, "num_logits_indices": len(own)}
