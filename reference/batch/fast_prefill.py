"""Which tokens of a prompt still need the last layers?

In some models the last layers keep no keys and values of their own: they read the cache of an
earlier layer. During a prefill nobody reads what they make of a prompt's token, except where its
logits are wanted. So these layers run on those tokens alone: each request brings as many queries
as it has logits, and sees as many keys as before.
"""

from collections.abc import Sequence
from dataclasses import field, fields, make_dataclass
from typing import Any

import torch

from ...contract.fast_prefill_metadata import KV_SHARING_FAST_PREFILL_METADATA_FIELDS
from ...contract.kinds import HOST
from ...contract.metadata_classes import CommonAttentionMetadata, PagedAttentionMetadata
from ...engine.backend_interface import AttentionBackend, AttentionMetadataBuilder
from ...validation.step_shapes import check_has_logits_indices, check_logits_indices


def make_kv_sharing_fast_prefill_common_attn_metadata(
    common_attn_metadata: CommonAttentionMetadata,
) -> CommonAttentionMetadata:
    """Return the step as layers see it that run only on tokens whose logits are wanted.

    Args:
        common_attn_metadata: the step; its `logits_indices_padded` may lie on the host.

    Returns:
        The same object if no request brings more than one token. Else a step whose new tokens
        are the wanted ones, one request after another: starts, counts and positions are theirs,
        `max_query_len` is exact, and it has no logits fields any more, since all of its tokens
        are wanted. Lengths, rows, slots and flags stay: these layers read the cache of another
        and store nothing.

    Raises:
        ValueError: no wanted tokens are given, or they are not the last of their request, in
            order: causal attention would place their queries elsewhere.
        NotImplementedError: trees of drafts.
        IndexError: a token that the step does not have.

    Source:
        vLLM's function of that name, which counts whatever tokens it is given, and makes every
        step causal.

    Example:
        Of 15 and 5 new tokens, the last one and the last two go on.

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
    check_has_logits_indices(common)
    assert common.logits_indices_padded is not None
    wanted = common.logits_indices_padded[: common.num_logits_indices]
    check_logits_indices(common.query_start_loc_cpu, wanted.to(HOST))
    # step: count the logits of each request
    starts = common.query_start_loc_cpu.tolist()
    counts = [0] * (len(starts) - 1)
    for token in wanted.tolist():
        for req in range(len(counts)):
            if starts[req] <= token < starts[req + 1]:
                counts[req] += 1
    # step: add up where each request's logits start
    query_start_loc = torch.tensor([0, *counts], dtype=torch.int32, device=HOST).cumsum(
        0, dtype=torch.int32
    )
    # step: describe the step that has only these tokens
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


def subclass_attention_backend(
    name_prefix: str,
    attention_backend_cls: type[AttentionBackend],
    builder_cls: type[AttentionMetadataBuilder],
) -> type[AttentionBackend]:
    """Return a new backend that differs from another one in its builder alone.

    Args:
        name_prefix: what stands before the other's class name in the new one's.
        attention_backend_cls: the backend to derive from; it stays as it is.
        builder_cls: what builds the new one's metadata.

    Returns:
        A new class at every call.

    Source:
        vLLM's function of that name, whose classes answer, and whose instances fail.

    Example:
        >>> backend, builder = BACKENDS[0], BACKENDS[0].get_builder_cls()
        >>> mine = subclass_attention_backend("My", backend, builder)
        >>> issubclass(mine, backend), mine.get_builder_cls() is builder
        (True, True)
    """
    name = name_prefix + attention_backend_cls.__name__
    own = {
        "__module__": attention_backend_cls.__module__,
        "get_builder_cls": staticmethod(lambda: builder_cls),
    }
    return type(name, (attention_backend_cls,), own)


def subclass_attention_metadata(
    name_prefix: str,
    metadata_cls: type[Any],
    fields: Sequence[tuple[str, Any, Any]],
) -> type[Any]:
    """Return a new metadata class that has some more fields.

    Args:
        name_prefix: what stands before the other's class name in the new one's.
        metadata_cls: the dataclass to derive from; it stays as it is. The new one is frozen if
            it is.
        fields: name, type and default of each new field, given by keyword. A field that is
            there already keeps its place and gets the new default.

    Returns:
        A new class at every call.

    Raises:
        ValueError: a default that can be changed, such as a list.

    Source:
        vLLM's function of that name.

    Example:
        >>> counted = subclass_attention_metadata(
        ...     "Counted", BACKENDS[0].get_metadata_cls(), [("num_images", int, 0)]
        ... )
        >>> counted.__dataclass_fields__["num_images"].default
        0
    """
    added = [
        (name, kind, field(default=default, kw_only=True))
        for name, kind, default in fields
    ]
    made = make_dataclass(
        name_prefix + metadata_cls.__name__,
        added,
        bases=(metadata_cls,),
        frozen=metadata_cls.__dataclass_params__.frozen,
    )
    # from Python 3.12 on make_dataclass names the module that calls it
    made.__module__ = metadata_cls.__module__
    return made


def create_fast_prefill_custom_backend(
    prefix: str, underlying_attn_backend: type[AttentionBackend]
) -> type[AttentionBackend]:
    """Return a backend for layers that run only on tokens whose logits are wanted.

    Args:
        prefix: what stands before the other's class name in the new one's.
        underlying_attn_backend: what runs these layers.

    Returns:
        A subclass. Its builder takes the whole step and builds the metadata of the wanted tokens
        alone; that has two fields more, `logits_indices_padded` and `num_logits_indices` of the
        whole step, by which the layer picks its queries.

    Source:
        vLLM's function of that name.

    Example:
        >>> fast = create_fast_prefill_custom_backend("FastPrefill", BACKENDS[0])
        >>> fast.get_builder_cls().__name__
        'FastPrefillAttentionBuilder'
        >>> fast.get_metadata_cls().__dataclass_fields__["num_logits_indices"].name
        'num_logits_indices'
    """
    # step: give the metadata two more fields
    underlying_metadata = underlying_attn_backend.get_metadata_cls()
    metadata_cls = subclass_attention_metadata(
        "KVSharingFastPrefill",
        underlying_metadata,
        KV_SHARING_FAST_PREFILL_METADATA_FIELDS,
    )
    underlying_builder: Any = underlying_attn_backend.get_builder_cls()

    # step: build from the wanted tokens alone
    class FastPrefillAttentionBuilder(underlying_builder):  # type: ignore[misc]
        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> PagedAttentionMetadata:
            wanted = make_kv_sharing_fast_prefill_common_attn_metadata(
                common_attn_metadata
            )
            built = super().build(common_prefix_len, wanted, fast_build)
            values = {each.name: getattr(built, each.name) for each in fields(built)}
            # of the whole step: the layer picks its queries from all tokens
            values["logits_indices_padded"] = common_attn_metadata.logits_indices_padded
            values["num_logits_indices"] = common_attn_metadata.num_logits_indices
            metadata: PagedAttentionMetadata = metadata_cls(**values)
            return metadata

    # step: name both in a backend of their own
    backend = subclass_attention_backend(
        prefix, underlying_attn_backend, FastPrefillAttentionBuilder
    )
    setattr(backend, "get_metadata_cls", staticmethod(lambda: metadata_cls))  # noqa: B010
    return backend
