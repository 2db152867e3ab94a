"""Fast prefill: the last layers run only on tokens whose logits are wanted.

One histogram on the host counts the wanted tokens of all requests. Their indices are needed there,
so they are copied from the device once. If `logits_indices_padded` is on the host, nothing waits.
"""

import numpy as np
import torch

from ...contract.argument_types import typed
from ...contract.kinds import HOST
from ...contract.metadata_classes import CommonAttentionMetadata
from ...engine.backend_interface import AttentionBackend
from ...validation.step_shapes import check_wanted_logits
from .fast_prefill_backend import derive_fast_prefill_backend
from .fast_prefill_backend import (
    subclass_attention_backend as subclass_attention_backend,
)
from .fast_prefill_backend import (
    subclass_attention_metadata as subclass_attention_metadata,
)


@typed
def make_kv_sharing_fast_prefill_common_attn_metadata(
    common_attn_metadata: CommonAttentionMetadata,
) -> CommonAttentionMetadata:
    """Return the step that has only the tokens whose logits are wanted."""
    common = common_attn_metadata
    if common.max_query_len <= 1:
        return common
    wanted = check_wanted_logits(common)[: common.num_logits_indices]
    # step: count the wanted tokens of each request
    starts, on_host = common.query_start_loc_cpu.numpy(), wanted.to(HOST)
    req = np.searchsorted(starts[1:], on_host.numpy(), side="right")
    counts = np.bincount(req, minlength=len(starts) - 1)
    # step: compute the start of each request's wanted tokens
    wanted_starts = np.zeros(len(starts), dtype=np.int32)
    np.cumsum(counts, out=wanted_starts[1:])
    query_start_loc = torch.from_numpy(wanted_starts)
    # step: build the metadata of a step with only these tokens
    return common.replace(
        query_start_loc=query_start_loc.to(
            common.query_start_loc.device, non_blocking=True
        ),
        query_start_loc_cpu=query_start_loc,
        num_actual_tokens=len(wanted),
        max_query_len=int(counts.max(initial=0)),
        logits_indices_padded=None,
        num_logits_indices=None,
        max_logits_per_req=None,
        positions=None
        if common.positions is None
        else common.positions[wanted.to(common.positions.device)],
    )


@typed
def create_fast_prefill_custom_backend(
    prefix: str, underlying_attn_backend: type[AttentionBackend]
) -> type[AttentionBackend]:
    """Return a backend for layers that run only on tokens whose logits are wanted."""
    return derive_fast_prefill_backend(
        prefix,
        underlying_attn_backend,
        make_kv_sharing_fast_prefill_common_attn_metadata,
    )
