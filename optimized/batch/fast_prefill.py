"""Which tokens of a prompt still need the last layers?

The logits of all requests are counted in one histogram on the host. The tokens whose logits are
wanted are needed there, so they are fetched once if they lie on a device; a caller that keeps
`logits_indices_padded` on the host waits for nothing. The classes are made as in the reference.
"""

from collections.abc import Sequence
from dataclasses import field, fields, make_dataclass
from typing import Any

import numpy as np
import torch

from ...contract.fast_prefill_metadata import KV_SHARING_FAST_PREFILL_METADATA_FIELDS
from ...contract.kinds import HOST
from ...contract.metadata_classes import CommonAttentionMetadata, PagedAttentionMetadata
from ...engine.backend_interface import AttentionBackend, AttentionMetadataBuilder
from ...validation.step_shapes import check_has_logits_indices, check_logits_indices


def make_kv_sharing_fast_prefill_common_attn_metadata(
    common_attn_metadata: CommonAttentionMetadata,
) -> CommonAttentionMetadata:
    """Return the step as layers see it that run only on tokens whose logits are wanted."""
    common = common_attn_metadata
    if common.max_query_len <= 1:
        return common
    check_has_logits_indices(common)
    assert common.logits_indices_padded is not None
    wanted = common.logits_indices_padded[: common.num_logits_indices]
    on_host = wanted.to(HOST)
    check_logits_indices(common.query_start_loc_cpu, on_host)
    # step: count the logits of each request
    starts = common.query_start_loc_cpu.numpy()
    req = np.searchsorted(starts[1:], on_host.numpy(), side="right")
    counts = np.bincount(req, minlength=len(starts) - 1)
    # step: add up where each request's logits start
    wanted_starts = np.zeros(len(starts), dtype=np.int32)
    np.cumsum(counts, out=wanted_starts[1:])
    query_start_loc = torch.from_numpy(wanted_starts)
    # step: describe the step that has only these tokens
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


def subclass_attention_backend(
    name_prefix: str,
    attention_backend_cls: type[AttentionBackend],
    builder_cls: type[AttentionMetadataBuilder],
) -> type[AttentionBackend]:
    """Return a new backend that differs from another one in its builder alone."""
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
    """Return a new metadata class that has some more fields."""
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
    """Return a backend for layers that run only on tokens whose logits are wanted."""
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
