"""What does every attention backend have in common?

An engine asks a backend for four things: the shape of its cache, a builder that turns a step into
metadata, an implementation that runs a layer, and the reasons why it cannot run here. The names
and signatures are those of vLLM's V1 backends.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from .metadata_classes import CommonAttentionMetadata, PagedAttentionMetadata
from .refusals import check_positive
from .shapes import Key, KVCache, Output, Query, Value
from .specs import KVCacheSpec


class AttentionImpl(ABC):
    """One layer's attention: write the new keys and values, then attend.

    Args:
        num_heads: query heads.
        head_size: elements of a head.
        scale: what scores are multiplied with.
        num_kv_heads: key/value heads; None: as many as query heads.

    Raises:
        ValueError: heads that do not divide, or a size the backend does not take.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_positive(num_heads=num_heads, num_kv_heads=num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads = {num_heads} is not a multiple of num_kv_heads ="
                f" {num_kv_heads}"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.num_queries_per_kv = num_heads // num_kv_heads

    @abstractmethod
    def forward(
        self,
        layer: object,
        query: Query,
        key: Key,
        value: Value,
        kv_cache: KVCache,
        attn_metadata: PagedAttentionMetadata | None,
        output: Output,
    ) -> Output:
        """Write the step's keys and values, attend, and return `output`.

        Args:
            layer: the layer that calls; unused so far.
            query: [tokens, query_heads, head_size], decodes first; rows past
                `num_actual_tokens` are padding.
            key, value: [tokens, kv_heads, head_size].
            kv_cache: [2, num_blocks, block_size, kv_heads, head_size], changed.
            attn_metadata: the step; None in a profiling run, which leaves everything as it is.
            output: the shape of query, changed; padding rows are left as they are.
        """


class AttentionMetadataBuilder(ABC):
    """Turns one step into the metadata of a backend.

    Args:
        kv_cache_spec: the cache of the layers it builds for.
        layer_names: those layers.
        device: where the cache lies.
    """

    reorder_batch_threshold: ClassVar[int] = 1

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        device: torch.device | str,
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.device = torch.device(device)

    @abstractmethod
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedAttentionMetadata:
        """Return the backend's metadata of a step whose decodes come first.

        Args:
            common_prefix_len: tokens that all sequences share; 0, as no backend here reads a
                shared prefix once for the batch.
            common_attn_metadata: the step.
            fast_build: prefer a quick build over a fast step.

        Raises:
            ValueError: the decodes do not come first, or attention is not causal.
        """


class AttentionBackend(ABC):
    """A family of classes that belong together, and what they can do."""

    name: ClassVar[str]
    supported_dtypes: ClassVar[tuple[torch.dtype, ...]]

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_supported_dtypes(cls) -> list[torch.dtype]:
        return list(cls.supported_dtypes)

    @staticmethod
    @abstractmethod
    def get_supported_head_sizes() -> list[int]:
        """Return the head sizes it takes; an empty list: any."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Return the class that runs a layer."""

    @staticmethod
    @abstractmethod
    def get_metadata_cls() -> type[PagedAttentionMetadata]:
        """Return the class of its metadata."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Return the class that builds its metadata."""

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache."""

    @classmethod
    @abstractmethod
    def validate_configuration(
        cls, spec: KVCacheSpec, device: torch.device | str
    ) -> list[str]:
        """Return every reason why it cannot run such a cache there; an empty list: it can."""

    @classmethod
    def why_not(cls, spec: KVCacheSpec) -> list[str]:
        """Return the reasons that follow from the dtype and the head size alone."""
        reasons = []
        if spec.dtype not in cls.supported_dtypes:
            names = ", ".join(str(dtype) for dtype in cls.supported_dtypes)
            reasons.append(f"dtype = {spec.dtype}: expected one of {names}")
        sizes = cls.get_supported_head_sizes()
        if sizes and spec.head_size not in sizes:
            reasons.append(
                f"head_size = {spec.head_size}: expected one of"
                f" {', '.join(map(str, sizes))}"
            )
        return reasons


def metadata_fields(
    common: CommonAttentionMetadata, boundary: tuple[int, int, int, int]
) -> dict[str, Any]:
    """Return the fields of PagedAttentionMetadata, after the boundary has been checked.

    Args:
        common: the step.
        boundary: what split_decodes_and_prefills says of it.

    Raises:
        ValueError: a decode stands behind the boundary, or attention is not causal.
    """
    if not common.causal:
        raise ValueError(
            "causal = False: expected causal attention, the only kind these backends run"
        )
    num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens = boundary
    return {
        "num_actual_tokens": common.num_actual_tokens,
        "max_query_len": common.max_query_len,
        "query_start_loc": common.query_start_loc,
        "max_seq_len": common.max_seq_len,
        "seq_lens": common.seq_lens,
        "block_table": common.block_table_tensor,
        "slot_mapping": common.slot_mapping,
        "num_decodes": num_decodes,
        "num_decode_tokens": num_decode_tokens,
        "num_prefills": num_prefills,
        "num_prefill_tokens": num_prefill_tokens,
        "query_start_loc_cpu": common.query_start_loc_cpu,
        "seq_lens_cpu": common.seq_lens_cpu,
    }
