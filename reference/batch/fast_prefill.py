"""Fast prefill: the last layers run only on tokens whose logits are wanted.

In some models the last layers have no keys and values of their own: they read the cache of an
earlier layer. During a prefill, their output is needed only for tokens whose logits are wanted. So
these layers run on those tokens alone. Each request has as many queries as wanted logits, and as
many keys as before.
"""

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
    """Return the step that has only the tokens whose logits are wanted.

    Args:
        common_attn_metadata: the step. Its `logits_indices_padded` may be on the host.

    Returns:
        The same object if no request has more than one new token. Otherwise a step whose new
        tokens are the wanted ones, in request order. Starts, counts and positions are those of
        these tokens, and `max_query_len` is exact. The logits fields are None, since all tokens
        are wanted. Lengths, rows, slots and flags do not change, as these layers read another
        layer's cache and store nothing.

    Raises:
        ValueError: no wanted tokens are given, or they are not the last ones of their request in
            order, since causal attention would give them other positions.
        NotImplementedError: trees of draft tokens.
        IndexError: a token that is not in the step.

    Source:
        vLLM's function of that name.

    Example:
        Of 15 and 5 new tokens, the last one and the last two are kept.

        >>> step = build_common_attn_metadata(
        ...     query_lens=[15, 5],
        ...     num_computed_tokens=[0, 8],
        ...     block_rows=[[7], [2]],
        ...     block_size=16,
        ... ).replace(
        ...     logits_indices_padded=torch.tensor([14, 18, 19, 19]),
        ...     num_logits_indices=3,
        ... )
        >>> fast = make_kv_sharing_fast_prefill_common_attn_metadata(step)
        >>> fast.query_start_loc, fast.seq_lens
        (tensor([0, 1, 3], dtype=torch.int32), tensor([15, 13], dtype=torch.int32))
        >>> fast.num_actual_tokens, fast.max_query_len
        (3, 2)
    """
    common = common_attn_metadata
    if common.max_query_len <= 1:
        return common
    wanted = check_wanted_logits(common)[: common.num_logits_indices]
    # step: count the wanted tokens of each request
    starts = common.query_start_loc_cpu.tolist()
    counts = [0] * (len(starts) - 1)
    for token in wanted.tolist():
        for req in range(len(counts)):
            if starts[req] <= token < starts[req + 1]:
                counts[req] += 1
    # step: compute the start of each request's wanted tokens
    query_start_loc = torch.tensor([0, *counts], dtype=torch.int32, device=HOST).cumsum(
        0, dtype=torch.int32
    )
    # step: build the metadata of a step with only these tokens
    return common.replace(
        query_start_loc=query_start_loc.to(common.query_start_loc.device),
        query_start_loc_cpu=query_start_loc,
        num_actual_tokens=len(wanted),
        max_query_len=max(counts, default=0),
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
    """Return a backend for layers that run only on tokens whose logits are wanted.

    Args:
        prefix: prefix of the new class's name; the other class's name follows.
        underlying_attn_backend: the backend that runs these layers.

    Returns:
        A subclass. Its builder takes the whole step and builds the metadata of the wanted tokens
        alone. That metadata has two additional fields, `logits_indices_padded` and
        `num_logits_indices` of the whole step, by which the layer selects its queries.

    Source:
        vLLM's function of that name.

    Example:
        >>> fast = create_fast_prefill_custom_backend("FastPrefill", BACKENDS[0])
        >>> fast.get_builder_cls().__name__
        'FastPrefillAttentionBuilder'
        >>> fast.get_metadata_cls().__dataclass_fields__["num_logits_indices"].name
        'num_logits_indices'
    """
    return derive_fast_prefill_backend(
        prefix,
        underlying_attn_backend,
        make_kv_sharing_fast_prefill_common_attn_metadata,
    )
